"""PerSample: rewards that grade one completion at a time, so that one can fail alone."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from typing import Any

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import (
    RewardFailure,
    RewardFunction,
    is_batch_reward,
    reward_name,
)
from lightning_rl.rewards.log import RewardLog

SHARED = ("trainer_state", "log_extra", "log_metric")
"""Arguments that are no lists with a value per completion."""

Score = float | None | RewardFailure


class PerSample(ABC):
    """Wraps a reward function, and calls it with lists of one element, all at the same time.

    It keeps the function's name, by which scores are logged, and its parameters, by which it is
    given columns.
    """

    def __init__(self, function: RewardFunction) -> None:
        if is_batch_reward(function):
            raise ConfigError(
                f"reward {reward_name(function)} is a batch_reward, but {type(self).__name__} "
                "grades one completion at a time; use one without the other"
            )
        self.function = function
        self.__name__ = reward_name(function)
        self.__signature__ = inspect.signature(function)

    async def __call__(self, **arguments: Any) -> list[Score]:
        columns = {n: v for n, v in arguments.items() if n not in SHARED}
        shared = {n: v for n, v in arguments.items() if n in SHARED}
        count = len(next(iter(columns.values())))
        logs = [RewardLog(1) for _ in range(count)]
        samples = [
            {name: [v[i]] for name, v in columns.items()}
            | {name: logs[i].arguments().get(name, v) for name, v in shared.items()}
            for i in range(count)
        ]
        scores = await asyncio.gather(*(self.grade_one(sample) for sample in samples))
        log = RewardLog.of(arguments)
        if log is not None:
            log.join(logs)
        return list(scores)

    @abstractmethod
    async def grade_one(self, sample: dict[str, Any]) -> Score:
        """The score of one completion; lists of ``sample`` have one element, see ``SHARED``."""


def only_score(scores: Any) -> Any:
    """The one element of what a function returned for one completion.

    Raises:
        ValueError: if there is not exactly one.
    """
    scores = list(scores)
    if len(scores) != 1:
        raise ValueError(f"returned {len(scores)} scores for 1 completion")
    return scores[0]
