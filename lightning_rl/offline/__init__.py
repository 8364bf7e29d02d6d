"""Training without an engine: supervised, from preferences, or from recorded rollouts."""
