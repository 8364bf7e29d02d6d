"""Grading: a weighted sum of TRL-style reward functions, none of which can lose a rollout."""

import asyncio
import inspect
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_rl.config.arguments import configurable
from lightning_rl.config.schema import one_line
from lightning_rl.errors import AgentError, ConfigError, RewardError, require_finite
from lightning_rl.rewards.calling import (
    RewardCaller,
    RewardFailure,
    RewardFunction,
    is_async,
    is_batch_reward,
    require_order,
    reward_names,
    score_range,
)
from lightning_rl.rewards.log import RewardLog, TrainerState, mean
from lightning_rl.rewards.parts import LARGEST_REWARD, parts_of
from lightning_rl.rollout import Message, Rollout, RolloutStatus, as_text, own
from lightning_rl.run.loop.background import note_progress, run_async
from lightning_rl.vision.decoded import DecodedPictures, seen_in

if TYPE_CHECKING:  # worker processes of rewards need no tokenizers
    from transformers import PreTrainedTokenizerBase

_Call = Callable[[RewardFunction, dict[str, Any]], Awaitable[Any]]

_SHARE = 0.2
"""Share of an iteration above which a plain reward is worth a process of its own."""
_NOTABLE_S = 1.0
"""CPU seconds below which it is not, however short the iteration is."""


@configurable
class Rewards:
    """The weighted sum of several reward functions.

    Args:
        functions: reward functions, or objects with ``__call__``.
        weights: one per function; None: all 1.
        max_failed_share: the run stops if a larger share of a batch fails.

    Raises:
        ConfigError: if weights and functions differ in number, a weight is not finite, two
            functions share a name (see :func:`~.calling.reward_names`), one declares no proper
            range (:func:`~.calling.score_range`), or reads a score that does not exist yet
            (:func:`~.calling.require_order`).
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        max_failed_share: float = 0.1,
    ) -> None:
        if not functions:
            raise ConfigError("rewards=[] must have at least one reward function; add one")
        if classes := [f.__name__ for f in functions if isinstance(f, type)]:
            raise ConfigError(
                f"reward {classes[0]} is a class; pass an instance: {classes[0]}(...)"
            )
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"reward_weights has {len(weights)} values for {len(functions)} rewards; give each "
                "reward one"
            )
        require_finite(reward_weights=weights)
        if not 0 <= max_failed_share <= 1:
            raise ConfigError(f"max_failed_share={max_failed_share} must be in [0, 1]")
        self.functions = dict(zip(reward_names(functions), functions, strict=True))
        self.weights = dict(zip(self.functions, weights or [1.0] * len(functions), strict=True))
        self.max_failed_share = max_failed_share
        self._ranges = {name: score_range(function) for name, function in self.functions.items()}
        self._of_batch = {n: f for n, f in self.functions.items() if is_batch_reward(f)}
        self._of_group = {n: f for n, f in self.functions.items() if n not in self._of_batch}
        require_order(self._of_group | self._of_batch)
        self.state = TrainerState()
        """Training progress; the trainer keeps it up to date."""
        self._calls = RewardCaller()
        self._warned = False
        self._tokenizer: Any = None

    def configure(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Receive the policy's tokenizer, which tells whether a prompt ends in an open thought.

        Functions that have a ``configure``, as teachers do, receive it too.
        """
        self._tokenizer = tokenizer
        for function in self.functions.values():
            if (configure := getattr(function, "configure", None)) is not None:
                configure(tokenizer)

    @property
    def highest(self) -> float:
        """The highest reward that weights and declared ranges of scores allow."""
        best = [max(self.weights[n] * end for end in ends) for n, ends in self._ranges.items()]
        # Any reward may not apply, but not all of them.
        most = math.fsum(part for part in best if part > 0) if max(best) > 0 else max(best)
        return min(most, LARGEST_REWARD)

    @property
    def of_batch(self) -> list[str]:
        """Names of the rewards that look at a whole batch."""
        return list(self._of_batch)

    async def grade(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Set ``reward`` and ``reward_parts`` of every completed rollout, in place.

        ``reward_parts`` holds each score under its function's name, and the parts of a score under
        ``name/part`` (:func:`~.parts.parts_of`); these do not count again in the reward.

        A function that raises, or returns a wrong number of scores, marks all rollouts it was given
        FAILED; a score that is not a finite number within ±1e6, or is a :class:`RewardFailure`,
        only its own rollout. The reason is kept in ``rollout.error``, the traceback of what a
        function raised in ``rollout.extra["traceback"]``. Rollouts that already have a reward do
        not change.
        """
        await self.grade_ahead(groups)
        await self._score(_flatten(groups), self._of_batch, self._calls.call_in_loop)
        self._sum_rewards(_flatten(groups))

    async def grade_ahead(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Do the part of :meth:`grade` that needs only single groups, not a complete batch.

        If there is a :func:`batch_reward`, the rollouts still have no ``reward`` afterwards.
        """
        await asyncio.gather(
            *(self._score(group, self._of_group, self._calls.call_in_loop) for group in groups)
        )
        if not self._of_batch:
            self._sum_rewards(_flatten(groups))

    def grade_here(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Do the same as :meth:`grade`, and wait for it.

        Plain functions run in a separate thread: one that never ends is abandoned when a signal or
        ``Watchdog`` interrupts the wait. A function that turns out to use signals (such as
        math-verify's time limit) is called again in the calling thread, and from then on only
        there.
        """
        if any(is_async(function) for function in self.functions.values()):
            run_async(self.grade(groups))
            return
        for group in groups:
            _run_to_end(self._score(group, self._of_group, self._calls.call_and_wait))
        _run_to_end(self._score(_flatten(groups), self._of_batch, self._calls.call_and_wait))
        self._sum_rewards(_flatten(groups))

    def hanging(self) -> tuple[str, threading.Thread] | None:
        """Return the name of the plain function being called, and its thread; None if idle."""
        return self._calls.running()

    def end_iteration(self, seconds: float) -> None:
        """Warn, once, if a plain function computed for more than a fifth of so many seconds."""
        computed = self._calls.computed
        slow = [name for name, took in computed.items() if took > max(_NOTABLE_S, _SHARE * seconds)]
        if slow and not self._warned:
            self._warned = True
            warnings.warn(
                f"reward {slow[0]} computes for {computed[slow[0]]:.1f} of an iteration's "
                f"{seconds:.1f} s in the training process, where Python and torch take turns; wrap "
                "it in Isolated, which runs it in processes of its own",
                stacklevel=2,
            )
        computed.clear()

    def require_graded(self, rollouts: Sequence[Rollout], what: str = "rollouts") -> None:
        """Stop the run if rewards or the agent fail too often; ``what`` names the rollouts.

        Raises:
            RewardError: if more than ``max_failed_share`` of the rollouts failed; it holds them
                all, so that they are not lost.
            AgentError: likewise, if the first failed rollout never ended, so it was not gradable.
        """
        failed = [r for r in rollouts if r.status is RolloutStatus.FAILED]
        share = len(failed) / max(1, len(rollouts))
        if share > self.max_failed_share:
            ended = failed[0].finish_reason is not None
            kind, fate = (RewardError, "could not be graded") if ended else (AgentError, "failed")
            raise kind(
                f"{len(failed)} of {len(rollouts)} {what} {fate} ({share:.0%}, "
                f"max_failed_share={self.max_failed_share}); first error: {failed[0].error}",
                rollouts,
            )

    def close(self) -> None:
        """Free what rewards hold, such as worker processes; they start again when needed."""
        self._calls.close()
        for function in self.functions.values():
            close = getattr(function, "close", None)
            if close is not None:
                close()

    async def _score(
        self, group: Sequence[Rollout], functions: Mapping[str, RewardFunction], call: _Call
    ) -> None:
        """Call functions in turn on rollouts that have not failed and lack the function's score."""
        metrics: dict[str, list[float]] = defaultdict(list)
        for name, function in functions.items():
            rollouts = [r for r in group if _is_ungraded(r) and name not in r.reward_parts]
            if not rollouts:
                continue
            log = RewardLog(len(rollouts))
            scores = await call(function, self._arguments(function, rollouts, log))
            note_progress()
            if not isinstance(scores, RewardFailure):
                scores = _complete(scores, log, len(rollouts))
            if isinstance(scores, RewardFailure):
                _fail(rollouts, f"reward {name}: {scores.reason}", scores.traceback)
                continue
            for rollout, score in zip(rollouts, scores, strict=True):
                if isinstance(score, RewardFailure):
                    _fail([rollout], f"reward {name}: {score.reason}", score.traceback)
                    continue
                try:
                    parts, bounds = parts_of(name, score), self._ranges[name]
                    whole = parts[name]
                    if whole is not None and not bounds[0] <= whole <= bounds[1]:
                        told = f"returned {whole:g}, out of its score_range {bounds}"
                        raise ValueError(f"{told}; correct either")
                    rollout.reward_parts |= parts
                except ValueError as error:
                    _fail([rollout], f"reward {name}: {error}")
            for column, cells in log.extra.items():
                for rollout, value in zip(rollouts, cells, strict=True):
                    rollout.extra[column] = value
            for metric, values in log.metrics.items():
                metrics[metric] += values
        for rollout in filter(_is_ungraded, group):
            rollout.logged |= {metric: mean(values) for metric, values in metrics.items()}

    def _sum_rewards(self, rollouts: Sequence[Rollout]) -> None:
        """Set the reward of the rollouts that all functions have scored."""
        for rollout in filter(_is_ungraded, rollouts):
            scores = ((name, rollout.reward_parts.get(name)) for name in self.functions)
            parts = {name: score for name, score in scores if score is not None}
            reward = math.fsum(self.weights[n] * s for n, s in parts.items())
            if not parts:
                _fail([rollout], "no reward applies: every function returned None")
            elif abs(reward) > LARGEST_REWARD:
                _fail([rollout], f"the weighted sum of rewards, {reward:g}, is beyond ±1e6")
            else:
                rollout.reward, rollout.reward_weights = reward, self.weights

    def _arguments(
        self, function: RewardFunction, rollouts: list[Rollout], log: RewardLog
    ) -> dict[str, Any]:
        available: dict[str, Any] = {
            "prompts": [own(r.prompt.prompt) for r in rollouts],
            "completions": [own(r.completion) for r in rollouts],
            "completion_ids": [own(r.token_ids) for r in rollouts],
            "finish_reasons": [r.finish_reason for r in rollouts],
            "environment_rewards": [r.environment_reward for r in rollouts],
            "extras": [own(r.extra) for r in rollouts],
            "group_ids": [r.group_id for r in rollouts],
            "trainer_state": self.state,
            **log.arguments(),
        }
        # A batch may hold rows of different kinds; in a group all are one.
        for column in dict.fromkeys(name for r in rollouts for name in r.prompt.columns):
            values = [own(r.prompt.columns.get(column)) for r in rollouts]
            available.setdefault(column, values)
        # Only what the function has parameters for, unless it takes ``**kwargs``; pictures are much
        # to send to another process, for who does not look at them.
        parameters = inspect.signature(function).parameters.values()
        names = {p.name for p in parameters}
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        if "rollouts" in names:  # by name alone: who takes all takes what other processes can, too
            available["rollouts"] = rollouts
        if takes_all or "opened_thoughts" in names:  # which reads prompts, of any length
            available["opened_thoughts"] = [self._opens_thought(r) for r in rollouts]
        if "pictures" in names:
            available["pictures"] = [seen_in(r) for r in rollouts]
        if "images" in names:
            available.setdefault("images", [DecodedPictures(r.prompt.pictures) for r in rollouts])
        if takes_all:
            return available
        return {name: value for name, value in available.items() if name in names}

    def _opens_thought(self, rollout: Rollout) -> bool:
        """Tell whether the last text that the model was asked to continue ends with ``<think>``."""
        calls = rollout.model_calls()
        if self._tokenizer is None or not calls:
            return False
        end = self._tokenizer.decode(rollout.prompt_of(calls[-1])[-_TAIL:])
        return str(end).rstrip().endswith("<think>")


_TAIL = 16
"""Tokens at a prompt's end that suffice for ``<think>`` and a newline, even as single bytes."""


def _complete(scores: list[Any], log: RewardLog, count: int) -> list[Any] | RewardFailure:
    """Return the scores, or a failure unless scores and logged columns have one per completion."""
    try:
        if len(scores) != count:
            raise ValueError(f"returned {len(scores)} scores for {count} completions")
        log.require_complete()
    except ValueError as error:
        return RewardFailure(f"ValueError: {error}")
    return scores


def _run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


def _is_ungraded(rollout: Rollout) -> bool:
    """Tell whether a rollout's reward may still be set."""
    return rollout.completed and rollout.reward is None


def _flatten(groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def _fail(rollouts: Sequence[Rollout], error: str, traceback: str = "") -> None:
    several = f" (one of {len(rollouts)} in the call)" if len(rollouts) > 1 else ""
    for rollout in rollouts:
        rollout.status = RolloutStatus.FAILED
        rollout.reward = None
        asked, said = _shown(rollout.prompt.prompt), _shown(rollout.completion)
        rollout.error = f"{error}; prompt {asked!r}, completion {said!r}{several}"
        if traceback:
            rollout.extra["traceback"] = traceback


def _shown(content: str | Sequence[Message]) -> str:
    """Return text, or the last of some chat messages, at a length that fits into a message."""
    return one_line(as_text(content if isinstance(content, str) else content[-1:]), 200)
