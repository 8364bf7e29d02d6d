"""Agents' networks: bodies compute features of observations, heads actions and values of these."""
