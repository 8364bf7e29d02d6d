"""A run's directory: atomic files, checkpoints, metrics, and resuming from them."""
