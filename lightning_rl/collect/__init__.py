"""Collecting: which group is generated when, and batch after batch of those worth training on."""
