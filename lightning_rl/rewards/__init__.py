"""Grading: reward functions, judges and tests; none of them can lose or hang a rollout."""
