"""Provide agents for what a collector of environments has started."""

from typing import Any

import torch

from lightning_rl.envs import ActorCritic
from lightning_rl.envs.collector import EnvCollector
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.watch import Watch


def agent_for(made: EnvCollector, seed: int = 0, **options: Any) -> dict[str, ActorCritic]:
    """Return the only agent there, with the weights that a seed draws."""
    torch.manual_seed(seed)
    agent = ActorCritic(**options)
    agent.build(made.agents[AGENT])
    return {AGENT: agent}


def collected(made: Any, agents: Any, iteration: int, steps: int) -> Any:
    """Return a batch, collected as a data module does it."""
    return Watch(made, made.env.name)(lambda: made.collect(agents, iteration, steps))
