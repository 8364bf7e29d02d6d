"""Grading: reward functions, judges and tests, none of which can lose or hang a rollout."""
