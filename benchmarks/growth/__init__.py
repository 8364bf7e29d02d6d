"""Whether anything grows faster than the work: ``python -m benchmarks.growth``."""
