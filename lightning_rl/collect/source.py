"""GroupSource: issues groups of empty rollouts, prompt after prompt."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_rl.agents.base import new_rollouts
from lightning_rl.data.prompts import Prompts
from lightning_rl.engines.sampling import Sampling
from lightning_rl.rollout import Group, Prompt
from lightning_rl.run.dist import reshard


class GroupSource:
    """Draws prompts and turns each into a group; knows how many groups make a batch.

    On several ranks each has a source. All draw the same prompts, and each keeps every n-th, with
    the place and the seeds that it would have on one process.

    Args:
        prompts: where prompts come from; loaded.
        num_groups: groups per iteration (B), of this rank.
        group_size: rollouts per group (G).
        sampling: for all of them.
        seed: from which every rollout's own is derived.
        iterations: how many the run has; no collector works ahead beyond them. None: no end.
        rank: which of the ``ranks`` this one is.
        ranks: how many share the prompts.
    """

    def __init__(
        self,
        prompts: Prompts,
        num_groups: int,
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        iterations: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.prompts = prompts
        self.num_groups = num_groups
        self.group_size = group_size
        self.sampling = sampling
        self.seed = seed
        self.iterations = iterations
        self.rank = rank
        self.ranks = ranks
        self.iteration = 0
        self.drawn = 0
        """Prompts of this rank's that were drawn, over the whole run."""
        self._place = 0
        self._again: deque[Prompt] = deque()

    def begin(self, iteration: int) -> None:
        """From now on groups are issued for this iteration (or ahead of later ones)."""
        if iteration != self.iteration:
            self.iteration, self._place = iteration, 0

    def next(self) -> Group:
        """The next prompt's group; prompts that were given back come first."""
        return self.issue(self._again.popleft() if self._again else self._draw())

    def _draw(self) -> Prompt:
        self.drawn += 1
        return self.prompts.draw(self.ranks)[self.rank]

    def catch_up(self, drawn: int) -> None:
        """Draw as far as another rank has, so that all go on from the same place."""
        while self.drawn < drawn:
            self.give_back(self._draw())

    def issue(self, prompt: Prompt) -> Group:
        """A new group of this prompt."""
        place = self._place * self.ranks + self.rank
        group = new_rollouts(
            [prompt], self.group_size, self.sampling, self.seed, self.iteration, place
        )
        self._place += 1
        return group

    def give_back(self, prompt: Prompt) -> None:
        """Issue a prompt again whose group came to nothing."""
        self._again.append(prompt)

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {
            "prompts": self.prompts.state_dict(),
            "ranks": self.ranks,
            "drawn": self.drawn,
            "iteration": self.iteration,
            "place": self._place,
            "again": [asdict(prompt) for prompt in self._again],
        }

    def load_shares(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on where the sources of all ranks stood; there may have been more of them, or fewer.

        Prompts that only some had come to yet, and those to be issued again, are dealt out anew.
        """
        if len(states) == self.ranks:
            self.load_state_dict(states[self.rank])
            return
        furthest = max(state["drawn"] for state in states)
        again = []
        for rank, state in enumerate(states):
            one = GroupSource(self.prompts, 1, 1, self.sampling, rank=rank, ranks=len(states))
            one.load_state_dict(state)
            one.catch_up(furthest)  # afterwards the prompts stand where all of them do
            again.append(one._again)
        self._again = deque(reshard(list(map(list, again)), self.rank, self.ranks))
        self.drawn = furthest
        # Places that no rank has used: those of an iteration tell its groups apart.
        used = max(state["place"] for state in states) * len(states)
        self.iteration, self._place = states[0]["iteration"], math.ceil(used / self.ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, with as many ranks."""
        self.prompts.load_state_dict(state["prompts"])
        self.drawn = state["drawn"]
        self.iteration, self._place = state["iteration"], state["place"]
        self._again = deque(Prompt(**record) for record in state["again"])
