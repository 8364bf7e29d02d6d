"""Rollouts on disk: one record form in three file formats."""
