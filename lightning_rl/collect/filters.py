"""Filters: which groups are worth training on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.rollout import Rollout


class GroupFilter(ABC):
    """Keeps or rejects a graded group; rejected ones are replaced by groups of new prompts.

    ``min_group_size``: it would reject every group with fewer rollouts.
    """

    min_group_size: ClassVar[int] = 1

    @abstractmethod
    def keep(self, group: Sequence[Rollout]) -> bool:
        """Whether to train on this group."""


@configurable
@dataclass(frozen=True)
class RewardSpread(GroupFilter):
    """Rejects groups whose rewards are all alike: they have no advantage (DAPO, section 3.2).

    Args:
        min_spread: largest minus smallest reward must exceed this.

    Raises:
        ConfigError: if ``min_spread`` is negative or not finite.
    """

    min_group_size: ClassVar[int] = 2

    min_spread: float = 0.0

    def __post_init__(self) -> None:
        require_finite(min_spread=self.min_spread)
        require_at_least(0, min_spread=self.min_spread)

    def keep(self, group: Sequence[Rollout]) -> bool:
        rewards = [r.reward for r in group if r.completed and r.reward is not None]
        return bool(rewards) and max(rewards) - min(rewards) > self.min_spread
