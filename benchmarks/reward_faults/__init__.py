"""Show what bad rewards do to a run: ``python -m benchmarks.reward_faults``."""
