"""Check a GPU machine, most important first: ``python -m benchmarks.gpu``."""
