"""Calling reward functions of any kind, so that none can hang or end the run."""

import asyncio
import functools
import inspect
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.log import RewardLog
from lightning_rl.rewards.parts import PlainScore
from lightning_rl.run.exits import EndsProcess, UsesSignals, function_called_here
from lightning_rl.run.loop import wait
from lightning_rl.run.threads import CallingThread

RewardFunction = Callable[..., list[Any]]
"""``f(prompts, completions, **columns) -> list[float]``, plain or ``async``.

It gets one group at a time, unless :func:`batch_reward` marks it. Besides the dataset's columns it
may ask by name for ``completion_ids`` (list[list[int]]), ``finish_reasons`` (list[str]),
``opened_thoughts`` (list[bool]: the prompt ends with ``<think>``, so the text begins in a thought),
``environment_rewards`` (list[float | None]), ``group_ids`` (list[str]), ``pictures`` (a sequence of
PIL images for each completion) and, as in TRL, for ``images`` (of the prompt alone),
``trainer_state`` (a :class:`~.log.TrainerState`), ``log_extra(column, values)`` and
``log_metric(name, value)``. ``None`` in what it returns means that this reward does not apply to
that completion, a :class:`RewardFailure` that it could not be graded. In place of a number it may
return several, as a mapping or a list (:func:`~.parts.parts_of`).
"""


@dataclass(frozen=True)
class RewardFailure:
    """Stands in a list of scores for one that could not be had: only that rollout is FAILED."""

    reason: str


def is_async(function: RewardFunction) -> bool:
    """True for an ``async`` function, or an object whose ``__call__`` is one."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def reward_name(function: RewardFunction) -> str:
    """The name under which a function's scores are logged; of a ``partial``, what it wraps has."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def reward_names(functions: Sequence[RewardFunction]) -> list[str]:
    """A name for each of several functions, no two of which are the same.

    Where a ``partial``, lambda, bound method or object is called as one before it, it gets a
    number: ``right``, ``right_2``.

    Raises:
        ConfigError: if two have the same name of their own.
    """
    own = [reward_name(function) for function in functions if _has_own_name(function)]
    if twice := next((name for name in own if own.count(name) > 1), None):
        raise ConfigError(f"two rewards share a name, {twice!r}, of {own}; rename one")
    taken, names = set(own), []
    for function in functions:
        plain = name = reward_name(function)
        numbers = itertools.count(2)
        while name in taken and not _has_own_name(function):
            name = f"{plain}_{next(numbers)}"
        taken.add(name)
        names.append(name)
    return names


def _has_own_name(function: RewardFunction) -> bool:
    """Whether somebody chose the name for this function, and not for what it is made of."""
    function = getattr(function, "function", function)  # of what wraps it and keeps its name
    named = getattr(function, "__name__", "<lambda>") != "<lambda>"
    return named and not inspect.ismethod(function)


F = TypeVar("F", bound=RewardFunction)


def batch_reward(function: F) -> F:
    """Mark a reward function, or a class of such: it is called once with the whole batch.

    So it can compare completions of different prompts. The batch is what is graded together: the
    groups of an iteration, on each process its own; with filters those of each round; and in an
    evaluation all. Collectors that work ahead let it wait until the batch is complete.
    """
    function.per_batch = True  # type: ignore[attr-defined]
    return function


def is_batch_reward(function: RewardFunction) -> bool:
    """True if :func:`batch_reward` has marked it."""
    return bool(getattr(function, "per_batch", False))


class RewardCaller:
    """Calls reward functions: plain ones in a thread that can be left behind, one at a time.

    Each call comes to a list of scores, or to a :class:`RewardFailure`; what is raised is why not
    to wait for it.
    """

    def __init__(self) -> None:
        self._thread = CallingThread("rewards")
        self._name = ""
        self._use_signals: list[RewardFunction] = []

    def running(self) -> tuple[str, threading.Thread] | None:
        """The plain function that is in the middle of a call, and its thread."""
        thread = self._thread.thread
        return None if thread is None else (self._name, thread)

    async def call_in_loop(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        """Call from the event loop, in which engines step."""
        if is_async(function):
            return await _call_async(lambda: function(**arguments))
        outcome = await self._thread.heard(self._submit(function, arguments))
        return await _call_async(lambda: outcome) if inspect.isawaitable(outcome) else outcome

    async def call_and_wait(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        """Call a plain function, and wait without an event loop."""
        if function in self._use_signals:
            return _call(function, arguments)
        call = self._submit(function, arguments)
        try:
            outcome = wait(call)
        except BaseException:
            self._thread.abandon(call)
            raise
        if isinstance(outcome, _NeedsMain):
            self._use_signals.append(function)
            if (log := RewardLog.of(arguments)) is not None:
                log.clear()
            return _call(function, arguments)
        if inspect.isawaitable(outcome):
            raise ConfigError(
                f"reward {reward_name(function)} is a plain function that returned an awaitable; "
                "make it `async def`"
            )
        return outcome

    def _submit(self, function: RewardFunction, arguments: dict[str, Any]) -> Future[Any]:
        def call() -> Any:
            self._name = reward_name(function)
            return _call(function, arguments)

        return self._thread.submit(call)


class _NeedsMain(RewardFailure):
    """It uses signals, which it may not where it was called."""


def _call(function: RewardFunction, arguments: dict[str, Any]) -> Any:
    """A function's list of scores, or why there is none; an awaitable as it is."""
    try:
        with function_called_here():
            result = function(**arguments)
            return result if inspect.isawaitable(result) else _scores(result)
    except BaseException as error:  # a user's code may raise anything; it is kept, not hidden
        main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and main:
            raise  # the user's own
        return _failure(error)


async def _call_async(call: Callable[[], Any]) -> Any:
    """The list of scores of an ``async`` function, or why there is none."""
    try:
        with function_called_here():
            return _scores(await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the loop's thread
        return _failure(error)


def _scores(result: Any) -> list[Any]:
    """What a function returned, as a list.

    Raises:
        ValueError: for a single score, say.
    """
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise ValueError(f"returned {result!r:.200}, not a list with a score for each completion")
    return list(result)


def _failure(error: BaseException) -> RewardFailure:
    if isinstance(error, UsesSignals):
        return _NeedsMain(f"{error}, and this is another: wrap it in Isolated")
    if isinstance(error, EndsProcess):
        return RewardFailure(f"called {error}, which would have ended the run as if it were done")
    return RewardFailure(f"{type(error).__name__}: {error}")


SHARED = ("trainer_state", "log_extra", "log_metric")
"""Arguments that are no lists with a value per completion."""

Score = PlainScore | RewardFailure


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
