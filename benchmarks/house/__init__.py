"""Count the house, and the way its imports run: ``python -m benchmarks.house``."""
