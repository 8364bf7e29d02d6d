"""Rollouts that stay: files in three formats, and a replay buffer over one of them."""
