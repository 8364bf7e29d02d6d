"""Tell whether a change leaves eight runs as they were: ``python -m benchmarks.same_runs``."""
