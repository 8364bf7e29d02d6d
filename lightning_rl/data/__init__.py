"""Prompts, their sources, and rollouts packed into tensors."""
