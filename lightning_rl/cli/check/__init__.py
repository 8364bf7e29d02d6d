"""``lightning-rl check`` and ``doctor``: check a configuration, and the machine, before a run."""
