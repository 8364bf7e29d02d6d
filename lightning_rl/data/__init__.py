"""Prompts, where they come from, and rollouts packed into tensors."""
