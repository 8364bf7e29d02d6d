"""A corpus of configurations with one planted fault each, and of sound ones."""
