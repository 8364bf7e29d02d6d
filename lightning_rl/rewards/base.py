"""Grading: user functions in TRL's form, several with weights, none of which can lose a rollout."""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from lightning_rl.errors import ConfigError, RewardError
from lightning_rl.rollout import Rollout, RolloutStatus

RewardFunction = Callable[..., list[float]]
"""``f(prompts, completions, **columns) -> list[float]``, plain or ``async``.

It gets one group at a time. Besides the dataset's columns it may ask by name for
``completion_ids`` (list[list[int]]) and ``finish_reasons`` (list[str]). ``None`` in the returned
list means that this reward does not apply to that completion.
"""


class Rewards:
    """The weighted sum of several reward functions.

    Args:
        functions: reward functions, or objects with ``__call__``.
        weights: one per function; None: all 1.
        max_failed_share: share of a batch that may fail before the run stops.

    Raises:
        ConfigError: if weights and functions differ in number, or two functions share a name.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        max_failed_share: float = 0.1,
    ) -> None:
        if not functions:
            raise ConfigError("rewards=[] grades nothing; name at least one reward function")
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"reward_weights has {len(weights)} values for {len(functions)} rewards; give one "
                "each"
            )
        if not 0 <= max_failed_share <= 1:
            raise ConfigError(f"max_failed_share={max_failed_share} must be in [0, 1]")
        self.functions = {reward_name(f): f for f in functions}
        if len(self.functions) != len(functions):
            raise ConfigError(
                f"two rewards share a name among {[reward_name(f) for f in functions]}; rename one"
            )
        self.weights = dict(zip(self.functions, weights or [1.0] * len(functions), strict=True))
        self.max_failed_share = max_failed_share

    async def grade(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Set ``reward`` and ``reward_parts`` of every completed rollout, in place.

        A function that raises or returns something unusable marks its group FAILED, with the error
        kept in ``rollout.error``.

        Raises:
            RewardError: when more than ``max_failed_share`` of the rollouts failed here.
        """
        await asyncio.gather(*(self._grade_group(group) for group in groups))
        rollouts = [rollout for group in groups for rollout in group]
        failed = [r for r in rollouts if r.status is RolloutStatus.FAILED]
        share = len(failed) / max(1, len(rollouts))
        if share > self.max_failed_share:
            raise RewardError(
                f"{len(failed)} of {len(rollouts)} rollouts could not be graded ({share:.0%}, "
                f"max_failed_share={self.max_failed_share}); first error: {failed[0].error}"
            )

    async def _grade_group(self, group: Sequence[Rollout]) -> None:
        rollouts = [r for r in group if r.status is RolloutStatus.COMPLETED]
        if not rollouts:
            return
        for name, function in self.functions.items():
            try:
                scores = list(await _call(function, rollouts))
                _check(scores, len(rollouts))
            except Exception as error:  # a user's code may raise anything; it is kept, not hidden
                _fail(rollouts, f"reward {name}: {type(error).__name__}: {error}")
                return
            for rollout, score in zip(rollouts, scores, strict=True):
                rollout.reward_parts[name] = None if score is None else float(score)
        for rollout in rollouts:
            parts = {n: s for n, s in rollout.reward_parts.items() if s is not None}
            if parts:
                rollout.reward = math.fsum(self.weights[n] * s for n, s in parts.items())
            else:
                _fail([rollout], "no reward applies: every function returned None")


def reward_name(function: RewardFunction) -> str:
    """The name under which a function's scores are logged."""
    return getattr(function, "__name__", type(function).__name__)


async def _call(function: RewardFunction, rollouts: list[Rollout]) -> Any:
    available: dict[str, Any] = {
        "prompts": [r.prompt.prompt for r in rollouts],
        "completions": [r.completion for r in rollouts],
        "completion_ids": [r.token_ids for r in rollouts],
        "finish_reasons": [r.finish_reason for r in rollouts],
    }
    for column in rollouts[0].prompt.columns:
        available.setdefault(column, [r.prompt.columns[column] for r in rollouts])
    result = function(**_accepted(function, available))
    return await result if inspect.isawaitable(result) else result


def _accepted(function: RewardFunction, available: dict[str, Any]) -> dict[str, Any]:
    """Only what the function has parameters for, unless it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return available
    names = {p.name for p in parameters}
    return {name: value for name, value in available.items() if name in names}


def _check(scores: list[Any], count: int) -> None:
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} completions")
    for score in scores:
        if score is not None and not math.isfinite(float(score)):
            raise ValueError(f"returned {score!r}; a score must be a finite number or None")


def _fail(rollouts: Sequence[Rollout], error: str) -> None:
    for rollout in rollouts:
        rollout.status = RolloutStatus.FAILED
        rollout.reward = None
        rollout.error = error
