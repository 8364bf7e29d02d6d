"""Advantages and losses of steps in environments: no tokens, no rollouts."""
