"""Collecting: decides when each group is generated, and makes batches of the useful ones."""
