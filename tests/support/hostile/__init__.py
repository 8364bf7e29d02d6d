"""Provide hostile calls: what is wrong outside of a run, and what a user is told about it."""
