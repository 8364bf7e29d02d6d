"""Rollouts on disk: one form of record in three file formats."""
