"""Measure what a small model learns of five tasks: ``python -m benchmarks.small_model``."""
