"""How a policy learns: its own loop, precision and schedules; SFT, DPO, recorded rollouts."""
