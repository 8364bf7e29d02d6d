"""The house in numbers, and the way its imports run: ``python -m benchmarks.house``."""
