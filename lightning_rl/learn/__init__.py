"""How a policy learns: the update, loops without a Trainer, SFT, DPO and recorded rollouts."""
