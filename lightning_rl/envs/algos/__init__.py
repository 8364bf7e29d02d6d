"""Advantages and losses of steps in environments; they know no tokens or rollouts."""
