"""Weights on their way from the trainer to an engine: when, in which order, and by what."""
