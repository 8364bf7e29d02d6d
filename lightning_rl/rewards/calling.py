"""Calls reward functions of any kind, so that none can hang or end the run."""

import asyncio
import functools
import inspect
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from traceback import TracebackException
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

from transformers import PreTrainedTokenizerBase

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.log import RewardLog
from lightning_rl.rewards.parts import LARGEST_REWARD, PlainScore
from lightning_rl.run.loop.background import wait
from lightning_rl.run.loop.stacks import where_raised
from lightning_rl.run.loop.threads import CallingThread
from lightning_rl.run.processes.exits import EndsProcess, UsesSignals, function_called_here

RewardFunction = Callable[..., list[Any]]
"""``f(prompts, completions, **columns) -> list[float]``, plain or ``async``.

It gets one group at a time, unless :func:`batch_reward` marks it. Besides the dataset's columns, it
may have parameters named ``completion_ids`` (list[list[int]]), ``finish_reasons`` (list[str]),
``opened_thoughts`` (list[bool]: the prompt ends with ``<think>``, so the text begins in a thought),
``environment_rewards`` (list[float | None]), ``group_ids`` (list[str]), ``pictures`` (a sequence of
PIL images for each completion) and, as in TRL, ``images`` (of the prompt alone), ``trainer_state``
(a :class:`~.log.TrainerState`), ``log_extra(column, values)`` and ``log_metric(name, value)``. A
score of ``None`` means that this reward does not apply to that completion, a :class:`RewardFailure`
that it could not be graded. Instead of one number per completion, it may return several, as a
mapping or a list (:func:`~.parts.parts_of`).
"""


class Usage(NamedTuple):
    """What a reward asks of a service for a group: requests, and tokens that are read and written.

    Tokens are upper bounds; None: they are not known.
    """

    requests: float
    read: float | None = None
    written: float | None = None


@runtime_checkable
class AsksService(Protocol):
    """A reward that asks a service about completions, which takes time and may cost money."""

    def usage(
        self, tokenizer: PreTrainedTokenizerBase, prompt: float, completion: float, size: int
    ) -> Usage:
        """Return what a group asks for.

        Args:
            tokenizer: counts the tokens of what the reward adds.
            prompt: tokens of the prompt.
            completion: tokens of each completion.
            size: the number of completions.
        """


@runtime_checkable
class HoldsModel(Protocol):
    """A reward function that computes with a model in the training process.

    ``device`` is where; None: on a GPU if there is one.
    """

    device: str | None

    def weight_bytes(self) -> int:
        """Return the bytes that the model's weights will take, without reading them."""


@dataclass(frozen=True)
class RewardFailure:
    """Takes the place of a score that could not be computed: only that rollout is FAILED.

    Args:
        reason: why, in a line.
        traceback: of the exception that was the reason, as Python prints it; empty: there was none.
    """

    reason: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, reason: str | None = None) -> Self:
        """Return the failure that an exception is, with the line of the user's code that raised it.

        ``reason`` replaces the exception's own message.
        """
        description = TracebackException.from_exception(error)  # whose message may itself raise
        location = where_raised(description.stack)
        message = f"{type(error).__name__}: {description}" if reason is None else reason
        return cls(
            f"{message}, at {location}" if location else message, "".join(description.format())
        )


def is_async(function: RewardFunction) -> bool:
    """Tell whether a function, or an object's ``__call__``, is ``async``."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def reward_name(function: RewardFunction) -> str:
    """Return the name to log a function's scores under; a ``partial`` has its target's name."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def reward_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return a unique name for each function.

    A ``partial``, lambda, bound method or object whose name is taken gets a number: ``right``,
    ``right_2``.

    Raises:
        ConfigError: if two functions that were given names of their own share one.
    """
    own = [reward_name(function) for function in functions if _has_own_name(function)]
    if twice := next((name for name in own if own.count(name) > 1), None):
        raise ConfigError(f"two rewards share the name {twice!r} (names: {own}); rename one")
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
    """Tell whether the name was chosen for this very function, not for what it is made from."""
    function = getattr(function, "function", function)  # of what wraps it and keeps its name
    named = getattr(function, "__name__", "<lambda>") != "<lambda>"
    return named and not inspect.ismethod(function)


F = TypeVar("F", bound=RewardFunction)


def batch_reward(function: F) -> F:
    """Mark a reward function, or a class of such functions, to be called once per batch.

    So it can compare completions of different prompts. The batch is what is graded together: the
    groups of an iteration on each process; with filters, those of each round; in an evaluation, all
    of them. Collectors that prefetch call it once the batch is complete.
    """
    function.per_batch = True  # type: ignore[attr-defined]
    return function


def is_batch_reward(function: RewardFunction) -> bool:
    """Tell whether :func:`batch_reward` has marked a function."""
    return bool(getattr(function, "per_batch", False))


def score_range(function: RewardFunction) -> tuple[float, float]:
    """Return the lowest and highest score that a function declares as its ``score_range``.

    Without it, these are the bounds of any score.

    Raises:
        ConfigError: if what it declares is no pair of such numbers, the lower one first.
    """
    declared = getattr(function, "score_range", (-LARGEST_REWARD, LARGEST_REWARD))
    try:
        low, high = map(float, declared)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -LARGEST_REWARD <= low <= high <= LARGEST_REWARD:
        raise ConfigError(
            f"reward {reward_name(function)}: score_range={declared!r} must be its lowest and its "
            "highest score, within ±1e6, such as (0, 1)"
        )
    return low, high


def require_order(called: Mapping[str, RewardFunction]) -> None:
    """Refuse a function that reads a score which does not exist when it is called.

    Args:
        called: the functions by name, in the order in which they are called. One that reads another
            score, from the rollouts, names it in its attribute ``reads``.

    Raises:
        ConfigError: names both.
    """
    earlier: list[str] = []
    for name, function in called.items():
        wanted = getattr(function, "reads", None)
        if wanted is not None and wanted.partition("/")[0] not in earlier:
            raise ConfigError(
                f"reward {name} reads the score of {wanted!r}, but the rewards before it are "
                f"{', '.join(earlier) or 'none'}; name one of these, or put {wanted!r} before it "
                "(rewards of a whole batch come after all others)"
            )
        earlier.append(name)


class RewardCaller:
    """Calls reward functions: plain ones one at a time, in a thread that can be abandoned.

    Each call returns a list of scores, or a :class:`RewardFailure`; it raises only what interrupts
    the wait, such as a cancellation or signal.
    """

    def __init__(self) -> None:
        self._thread = CallingThread("rewards")
        self._name = ""
        self._use_signals: list[RewardFunction] = []
        self.computed: defaultdict[str, float] = defaultdict(float)
        """CPU seconds of each plain function, in the thread in which it is called."""

    def running(self) -> tuple[str, threading.Thread] | None:
        """Return the name of the plain function being called, and its thread; None if idle."""
        thread = self._thread.thread
        return None if thread is None else (self._name, thread)

    def close(self) -> None:
        """End the thread; a later call starts another."""
        self._thread.close()

    async def call_in_loop(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        """Call a function from the event loop, in which engines run."""
        if is_async(function):
            return await _call_async(lambda: function(**arguments))
        outcome = await self._thread.heard(self._submit(function, arguments))
        return await _call_async(lambda: outcome) if inspect.isawaitable(outcome) else outcome

    async def call_and_wait(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        """Call a plain function, and wait for it without an event loop.

        Raises:
            ConfigError: if it returns an awaitable.
        """
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
            self._name, begin = reward_name(function), time.thread_time()
            try:
                return _call(function, arguments)
            finally:
                self.computed[self._name] += time.thread_time() - begin

        return self._thread.submit(call)


class _NeedsMain(RewardFailure):
    """The function uses signals, which work in the main thread only."""


def _call(function: RewardFunction, arguments: dict[str, Any]) -> Any:
    """Return a function's list of scores, or why it has none; return an awaitable unchanged."""
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
    """Return the list of scores of an ``async`` function, or why it has none."""
    try:
        with function_called_here():
            return _scores(await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the loop's thread
        return _failure(error)


def _scores(result: Any) -> list[Any]:
    """Return a function's result as a list.

    Raises:
        ValueError: if it is not a list of scores, but for example a single one.
    """
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise ValueError(f"returned {result!r:.200}; expected a list with a score per completion")
    return list(result)


def _failure(error: BaseException) -> RewardFailure:
    if isinstance(error, UsesSignals):
        return _NeedsMain.of(error, f"{error}, but rewards run in another: wrap it in Isolated")
    if isinstance(error, EndsProcess):
        end = f"called {error}, which would have ended the run as if it had finished"
        return RewardFailure.of(error, end)
    return RewardFailure.of(error)


SHARED = ("trainer_state", "log_extra", "log_metric")
"""Arguments that are not lists with a value per completion."""
OURS = (
    "prompts",
    "completions",
    "completion_ids",
    "finish_reasons",
    "opened_thoughts",
    "environment_rewards",
    "extras",
    "group_ids",
    "pictures",
    "rollouts",
    *SHARED,
)
"""Arguments that no column of a data set can be, since they have another meaning."""


def require_free(columns: Iterable[str], where: str) -> None:
    """Refuse columns that a reward function would never receive.

    Raises:
        ConfigError: names the first of them.
    """
    for name in columns:
        if name in OURS:
            raise ConfigError(
                f"{where}: the column {name!r} has the name of an argument that every reward "
                f"function may have, and would be hidden by it; rename it (columns: {{my_{name}: "
                f"{name}}})"
            )


Score = PlainScore | RewardFailure


class PerSample(ABC):
    """Wraps a reward function, and calls it for all completions concurrently, one per call.

    The arguments of each call are lists of one element. The wrapper keeps the function's name,
    under which scores are logged, its parameters, which select columns, and its declared range.
    """

    def __init__(self, function: RewardFunction) -> None:
        if is_batch_reward(function):
            raise ConfigError(
                f"reward {reward_name(function)} is a batch_reward, but {type(self).__name__} "
                "grades one completion at a time; remove one of the two"
            )
        self.function = function
        if hasattr(function, "score_range"):
            self.score_range = score_range(function)
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
        """Return the score of one completion; lists in ``sample`` have one element (``SHARED``)."""


def only_score(scores: Any) -> Any:
    """Return the only score that a function returned for one completion.

    Raises:
        ValueError: if there is not exactly one.
    """
    scores = list(scores)
    if len(scores) != 1:
        raise ValueError(f"returned {len(scores)} scores for 1 completion")
    return scores[0]
