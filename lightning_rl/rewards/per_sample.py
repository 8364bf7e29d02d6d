"""PerSample: rewards that grade one completion at a time, so that one can fail alone."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from typing import Any

from lightning_rl.rewards.base import RewardFailure, RewardFunction, reward_name

Score = float | None | RewardFailure


class PerSample(ABC):
    """Wraps a reward function, and calls it with lists of one element, all at the same time.

    It keeps the function's name, by which scores are logged, and its parameters, by which it is
    given columns.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self.__name__ = reward_name(function)
        self.__signature__ = inspect.signature(function)

    async def __call__(self, **columns: list[Any]) -> list[Score]:
        count = len(next(iter(columns.values())))
        samples = [{name: [v[i]] for name, v in columns.items()} for i in range(count)]
        return list(await asyncio.gather(*(self.grade_one(sample) for sample in samples)))

    @abstractmethod
    async def grade_one(self, sample: dict[str, list[Any]]) -> Score:
        """The score of one completion; each list of ``sample`` has one element."""


def only_score(scores: Any) -> Any:
    """The one element of what a function returned for one completion.

    Raises:
        ValueError: if there is not exactly one.
    """
    scores = list(scores)
    if len(scores) != 1:
        raise ValueError(f"returned {len(scores)} scores for 1 completion")
    return scores[0]
