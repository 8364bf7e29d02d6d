"""``lightning-rl check`` and ``doctor``: of a configuration, and of the machine, before a run."""
