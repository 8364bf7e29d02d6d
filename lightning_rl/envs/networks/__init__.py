"""Agents' networks: bodies make features of observations, heads actions and values of these."""
