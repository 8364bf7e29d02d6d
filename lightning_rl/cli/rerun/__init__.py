"""Doing a recorded rollout or iteration again, and saying where it first differs."""
