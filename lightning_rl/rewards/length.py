"""LengthReward: a reward for short completions, paid only where another reward is reached."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite
from lightning_rl.rewards.calling import RewardFailure, Score
from lightning_rl.rewards.comparing import share_beaten
from lightning_rl.rollout import Rollout


class LengthScale(ABC):
    """Turns the lengths of a group's paid completions into scores between 0 and 1."""

    @abstractmethod
    def __call__(self, lengths: Sequence[int]) -> list[float]:
        """Return a score for each length; a shorter one has no lower score."""


@configurable
class LinearLength(LengthScale):
    """1 up to ``shortest``, then linearly down to 0 at ``longest``, and 0 beyond.

    Args:
        longest: length from which on nothing is paid.
        shortest: length up to which all is paid.

    Raises:
        ConfigError: unless 0 <= shortest < longest.
    """

    def __init__(self, longest: int, shortest: int = 0) -> None:
        if not 0 <= shortest < longest:
            raise ConfigError(
                f"LinearLength(longest={longest}, shortest={shortest}): need 0 <= shortest < "
                "longest"
            )
        self.longest = longest
        self.shortest = shortest

    def __call__(self, lengths: Sequence[int]) -> list[float]:
        span = self.longest - self.shortest
        return [min(1.0, max(0.0, (self.longest - length) / span)) for length in lengths]


class RankedLength(LengthScale):
    """The share of the group's other paid completions that are longer; equal lengths count half.

    So it needs no bounds, and pays as much for a long task as for a short one. A completion that is
    the only one paid gets 0.5.
    """

    def __call__(self, lengths: Sequence[int]) -> list[float]:
        return share_beaten(lengths)


def _written(rollout: Rollout) -> int:
    return sum(call.stop - call.start for call in rollout.model_calls()) + rollout.dropped


def _turns(rollout: Rollout) -> int:
    return len(rollout.model_calls())


def _context(rollout: Rollout) -> int:
    ends = (rollout.read_by(call) + call.stop - call.start for call in rollout.model_calls())
    return max(ends, default=0)


MEASURES: dict[str, Callable[[Rollout], int]] = {
    "tokens": _written,
    "turns": _turns,
    "context": _context,
}
"""What the length of a rollout may be."""


@configurable
class LengthReward:
    """Between 0 and 1 for a short completion, to be added to another reward with a small weight.

    With ``only_if`` a wrong completion gets 0 however short it is, so the policy cannot earn
    anything by giving up early.

    Args:
        scale: turns lengths into scores: :class:`RankedLength`, :class:`LinearLength` or your own.
        only_if: name of a reward that stands before this one, or of a part of it
            (``graded/right``), as it is logged after ``reward/``; only completions that reach
            ``at_least`` in it are paid. None: all are.
        at_least: the score to reach.
        of: ``tokens``: what the model wrote, in all turns; ``turns``: its calls; ``context``: the
            tokens of its longest context, prompt and tools' results included.
        name: name under which the reward is logged.

    Raises:
        ConfigError: for a bound that is not finite.
    """

    score_range = (0.0, 1.0)

    def __init__(
        self,
        scale: LengthScale,
        only_if: str | None = None,
        at_least: float = 1.0,
        of: Literal["tokens", "turns", "context"] = "tokens",
        name: str = "length",
    ) -> None:
        require_finite(at_least=at_least)
        self.scale = scale
        self.reads = only_if
        self.at_least = at_least
        self.of = of
        self.__name__ = name

    def __call__(self, rollouts: list[Rollout]) -> list[Score]:
        scores: list[Score] = [0.0] * len(rollouts)
        paid = list[int]()
        for index, rollout in enumerate(rollouts):
            if self.reads is not None and self.reads not in rollout.reward_parts:
                scores[index] = RewardFailure(
                    f"only_if={self.reads!r} is no score of the completion, which has "
                    f"{', '.join(rollout.reward_parts) or 'none'}; name one of these"
                )
            elif self._is_paid(rollout):
                paid.append(index)
        lengths = [MEASURES[self.of](rollouts[index]) for index in paid]
        for index, score in zip(paid, self.scale(lengths), strict=True):
            scores[index] = score
        return scores

    def _is_paid(self, rollout: Rollout) -> bool:
        if self.reads is None:
            return True
        score = rollout.reward_parts[self.reads]
        return score is not None and score >= self.at_least
