"""RepeatedPrompts: the same few prompts again and again, for ``overfit_batches``."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_rl.collect.source import Prompts
from lightning_rl.rollout import Prompt


class RepeatedPrompts:
    """The first ``period`` prompts that a data set draws, over and over.

    With n x ``groups_per_iteration`` of them, iteration i has the prompts of iteration i mod n.

    Args:
        prompts: where they come from.
        period: how many.
    """

    def __init__(self, prompts: Prompts, period: int) -> None:
        self._prompts = prompts
        self._period = period
        self._kept: list[Prompt] = []
        self._place = 0

    def draw(self, count: int) -> list[Prompt]:
        """The next ``count`` of them."""
        drawn = []
        for _ in range(count):
            if self._place == len(self._kept) < self._period:
                self._kept += self._prompts.draw(1)
            drawn.append(self._kept[self._place])
            self._place = (self._place + 1) % self._period
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The data set's own, with what is repeated; primitives only."""
        kept = [asdict(prompt) for prompt in self._kept]
        return self._prompts.state_dict() | {"repeated": kept, "repeated_place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; one of a run without repetition begins to repeat."""
        self._prompts.load_state_dict(state)
        self._kept = [Prompt(**record) for record in state.get("repeated", [])][: self._period]
        self._place = state.get("repeated_place", 0) % self._period
