"""Grading with different rewards for each prompt set."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardsBySet:
    """Grades every group with the rewards of its prompt's set.

    It is used like :class:`Rewards`. A batch reward sees its own set's rollouts of the batch, and
    ``max_failed_share`` applies to each set separately.

    Args:
        by_set: rewards by name of the set; several sets may share one object.
    """

    def __init__(self, by_set: Mapping[str, Rewards]) -> None:
        self.by_set = dict(by_set)

    @property
    def of_batch(self) -> list[str]:
        """Names of the rewards that look at a whole batch."""
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
        """Stop the run if too large a share of any set's rollouts failed.

        Raises:
            RewardError: as :meth:`Rewards.require_graded`; names the set.
            AgentError: likewise, if an agent failed first.
        """
        for name, groups in self._shares([[rollout] for rollout in rollouts]).items():
            mine = [rollout for group in groups for rollout in group]
            self.by_set[name].require_graded(mine, f"rollouts of prompt set {name!r}")

    def _shares(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, list[Sequence[Rollout]]]:
        """Return the groups of each set that has any."""
        shares: dict[str, list[Sequence[Rollout]]] = {}
        for group in groups:
            name = group[0].prompt.set
            if name not in self.by_set:
                raise ConfigError(
                    f"group {group[0].group_id!r} belongs to prompt set {name!r}, which has no "
                    f"rewards (known: {', '.join(self.by_set)}); draw prompts only from the Mixture"
                )
            shares.setdefault(name, []).append(group)
        return shares
