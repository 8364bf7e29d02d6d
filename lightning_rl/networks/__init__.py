"""Agents' networks: bodies make features of observations, heads make actions and values of these."""
