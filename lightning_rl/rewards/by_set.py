"""Grading where each prompt set has rewards of its own."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardsBySet:
    """Grades every group with the rewards of the set that its prompt is from.

    It is used as :class:`Rewards` is. A batch reward sees what its set has in the batch, and
    ``max_failed_share`` holds for each set by itself.

    Args:
        by_set: rewards by the name of the set; several may share one.
    """

    def __init__(self, by_set: Mapping[str, Rewards]) -> None:
        self.by_set = dict(by_set)

    @property
    def of_batch(self) -> list[str]:
        """Names of those that look at a whole batch."""
        return list(dict.fromkeys(n for rewards in self.by_set.values() for n in rewards.of_batch))

    def configure(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Do what :meth:`Rewards.configure` does."""
        for rewards in self.by_set.values():
            rewards.configure(tokenizer)

    async def grade(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Do what :meth:`Rewards.grade` does."""
        await asyncio.gather(
            *(self.by_set[name].grade(mine) for name, mine in self._shares(groups).items())
        )

    async def grade_ahead(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Do what :meth:`Rewards.grade_ahead` does."""
        await asyncio.gather(
            *(self.by_set[name].grade_ahead(mine) for name, mine in self._shares(groups).items())
        )

    def grade_here(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Do what :meth:`Rewards.grade_here` does, set by set."""
        for name, mine in self._shares(groups).items():
            self.by_set[name].grade_here(mine)

    def require_graded(self, rollouts: Sequence[Rollout]) -> None:
        """Stop a run where too large a share of a set's rollouts failed.

        Raises:
            RewardError: naming the set, as :meth:`Rewards.require_graded` does.
            AgentError: the same, if an agent failed first.
        """
        for name, groups in self._shares([[rollout] for rollout in rollouts]).items():
            mine = [rollout for group in groups for rollout in group]
            self.by_set[name].require_graded(mine, f"rollouts of prompt set {name!r}")

    def _shares(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, list[Sequence[Rollout]]]:
        """The groups of each set that has any."""
        shares: dict[str, list[Sequence[Rollout]]] = {}
        for group in groups:
            name = group[0].prompt.set
            if name not in self.by_set:
                raise ConfigError(
                    f"group {group[0].group_id!r} is of prompt set {name!r}, which has no rewards "
                    f"(known: {', '.join(self.by_set)}); draw prompts from the Mixture alone"
                )
            shares.setdefault(name, []).append(group)
        return shares
