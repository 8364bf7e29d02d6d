"""Rewards that wait for a remote service, with limits on concurrency, time and retries."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.config.schema import one_line
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rewards.calling import (
    PerSample,
    RewardFailure,
    RewardFunction,
    Score,
    Usage,
    is_async,
    only_score,
)
from lightning_rl.rewards.log import RewardLog
from lightning_rl.run.retry import retry

T = TypeVar("T")


@configurable
class RemoteCalls:
    """Calls to a remote service, with limited concurrency, a timeout and retries.

    Args:
        max_concurrency: maximum number of calls at the same time.
        retries: attempts after the first; see :func:`retry`.
        timeout_s: seconds per attempt.
        first_wait_s: maximum seconds before the first retry; doubled for each further one.

    Raises:
        ConfigError: if values are out of range.
    """

    def __init__(
        self,
        max_concurrency: int = 16,
        retries: int = 3,
        timeout_s: float = 60.0,
        first_wait_s: float = 0.5,
    ) -> None:
        require_at_least(1, max_concurrency=max_concurrency)
        require_at_least(0, retries=retries, first_wait_s=first_wait_s)
        require_at_least(0.001, timeout_s=timeout_s)
        self.retries = retries
        self.timeout_s = timeout_s
        self.first_wait_s = first_wait_s
        self.max_concurrency = max_concurrency
        # A semaphore serves one event loop, and a script may use one after the other.
        self._gates: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()

    def usage(
        self, tokenizer: PreTrainedTokenizerBase, prompt: float, completion: float, size: int
    ) -> Usage:
        """Return one request for each completion, whose tokens are not known."""
        return Usage(size)

    async def limited(self, call: Callable[[], Awaitable[T]]) -> T | RewardFailure:
        """Return what a call returns, or a failure with the error of its last attempt."""
        attempts = 0

        async def attempt() -> T:
            nonlocal attempts
            attempts += 1
            return await call()

        loop = asyncio.get_running_loop()
        gate = self._gates.setdefault(loop, asyncio.Semaphore(self.max_concurrency))
        async with gate:
            try:
                return await retry(attempt, self.retries, self.timeout_s, self.first_wait_s)
            except Exception as error:  # anything may come from afar; it is kept, not hidden
                failure = RewardFailure.of(error)
                why = f"{one_line(failure.reason)} (after {attempts} attempts)"
                return replace(failure, reason=why)


@configurable
class Remote(RemoteCalls, PerSample):
    """Runs an ``async`` reward per completion, with limited concurrency, a timeout and retries.

    A completion whose last attempt failed is FAILED with that error; the others are graded.

    Args:
        function: an ``async`` reward function; it gets lists of one element.
        max_concurrency: maximum number of completions graded at the same time.
        retries: attempts after the first; see :func:`retry`.
        timeout_s: seconds per attempt.
        first_wait_s: maximum seconds before the first retry; doubled for each further one.

    Raises:
        ConfigError: if the function is not ``async``, or values are out of range.
    """

    def __init__(
        self,
        function: RewardFunction,
        max_concurrency: int = 16,
        retries: int = 3,
        timeout_s: float = 60.0,
        first_wait_s: float = 0.5,
    ) -> None:
        RemoteCalls.__init__(self, max_concurrency, retries, timeout_s, first_wait_s)
        PerSample.__init__(self, function)
        if not is_async(function):
            raise ConfigError(
                f"Remote needs an async function, but reward {self.__name__} is a plain one; make "
                "it async, or wrap it in Isolated instead"
            )

    async def grade_one(self, sample: dict[str, Any]) -> Score:
        log = RewardLog.of(sample)

        async def attempt() -> Score:
            if log is not None:
                log.clear()  # of what an attempt left that failed
            score: Score = only_score(await self.function(**sample))  # type: ignore[misc]
            if log is not None:
                log.require_complete()
            return score

        return await self.limited(attempt)
