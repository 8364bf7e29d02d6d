"""Provide protocols of more agents than the library's have."""

import torch

from lightning_rl.games.protocols.base import Protocol


class Panel(Protocol):
    """An advocate speaks in even rounds; of two judges the first is asked in 1, 3; both in 3."""

    agent_names = ("advocate", "first", "second")
    deciders = ("first", "second")
    agent_channel_visibility = tuple((name, "main") for name in agent_names)

    def __init__(self, **options) -> None:
        super().__init__(4, 1, **options)

    def is_active(self, agent, channel, round, seed=0):
        now = torch.as_tensor(round)
        return {"advocate": now % 2 == 0, "first": now % 2 == 1, "second": now == 3}[agent]
