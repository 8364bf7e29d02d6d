"""Processes: ranks and their messages, children and their end, cores and threads of each."""
