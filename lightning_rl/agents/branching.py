"""Branching: forks rollouts at some of their calls, from which they continue differently."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lightning_rl.agents.rows import captured, cut_anew
from lightning_rl.config.arguments import configurable
from lightning_rl.data.plans import GroupPlan
from lightning_rl.engines.sampling import seed_of
from lightning_rl.errors import ConfigError, EpisodeError, require_at_least
from lightning_rl.rollout import Fork, Rollout


class ForkPoints(ABC):
    """Chooses the calls before which a rollout is forked.

    The choice must not depend on what the model wrote from there on: otherwise a call would be
    credited for having been chosen.
    """

    @abstractmethod
    def chosen(self, rollout: Rollout, number: int) -> bool:
        """Tell whether to fork a completed rollout before its ``number``-th call, counted from 1.

        The answer for a rollout must never change.
        """


@configurable
@dataclass(frozen=True)
class EveryCall(ForkPoints):
    """Forks before every ``step``-th call from call ``first`` on; calls are counted from 1.

    Raises:
        ConfigError: unless ``first`` >= 2 and ``step`` >= 1.
    """

    first: int = 2
    step: int = 1

    def __post_init__(self) -> None:
        require_at_least(2, first=self.first)
        require_at_least(1, step=self.step)

    def chosen(self, rollout: Rollout, number: int) -> bool:
        return number >= self.first and (number - self.first) % self.step == 0


@configurable
@dataclass(frozen=True)
class FixedCalls(ForkPoints):
    """Forks before the calls with these ``numbers``, as far as a rollout has them; from 2 on.

    Raises:
        ConfigError: for no numbers, or one below 2: a group samples the first call anyway, once
            per rollout.
    """

    numbers: Sequence[int]

    def __post_init__(self) -> None:
        if not self.numbers or min(self.numbers) < 2:
            raise ConfigError(
                f"FixedCalls(numbers={list(self.numbers)}) must name calls >= 2; for more answers "
                "to the prompt itself raise group_size"
            )

    def chosen(self, rollout: Rollout, number: int) -> bool:
        return number in self.numbers


@configurable
@dataclass(frozen=True)
class RandomCalls(ForkPoints):
    """Forks before each call but the first with probability ``share``, drawn from the seed.

    Raises:
        ConfigError: unless ``share`` is in (0, 1].
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"RandomCalls(share={self.share}) must be > 0 and <= 1")

    def chosen(self, rollout: Rollout, number: int) -> bool:
        return random.Random(f"{rollout.seed}/{number}").random() < self.share


@configurable
class Branching(GroupPlan):
    """Forks rollouts: continues each ``k`` more times from the chosen calls.

    A branch begins with exactly the calls that its rollout made before the fork, token by token,
    without asking the engine, and then uses new seeds. It is a rollout of the same group with its
    own reward, and only its own calls are trained on. So the calls of a group form a tree, in
    which the branches estimate the expected reward from a state on: :class:`TreeRLOO` credits calls
    by it. Evaluations do not branch.

    The agent must continue from the calls in a rollout, as all agents of this library do, and ask
    the same calls before the fork. If a program does not (because it read a clock, for example),
    the branch is FAILED with the reason.

    Args:
        k: continuations of each chosen call, besides the rollout's own.
        at: chooses the calls before which rollouts are forked.

    Raises:
        ConfigError: unless ``k`` >= 1.
    """

    def __init__(self, k: int = 1, at: ForkPoints = EveryCall()) -> None:
        require_at_least(1, k=k)
        self.k = k
        self.at = at

    def grow(self, rollout: Rollout) -> list[Rollout]:
        if rollout.fork is not None:
            return []
        return [
            forked(rollout, calls, number)
            for calls in range(1, len(rollout.model_calls()))
            if self.at.chosen(rollout, calls + 1)
            for number in range(self.k)
        ]


def forked(rollout: Rollout, calls: int, number: int) -> Rollout:
    """Return a rollout that begins with the first ``calls`` calls of another.

    Args:
        rollout: the rollout to branch off from, possibly a recorded one; it shares no object with
            the branch.
        calls: the number of calls to keep, fewer than all; 0 starts over from the prompt.
        number: distinguishes the seeds of this branch from those of others at the same place.

    Raises:
        EpisodeError: if the rollout has too few calls.
    """
    made = rollout.model_calls()
    if not 0 <= calls < len(made):
        raise EpisodeError(
            f"cannot fork rollout {rollout.id!r} before call {calls + 1}: it has {len(made)}, "
            "counted from 1"
        )
    seed = seed_of(f"{rollout.own_seed}/fork/{calls}/{number}".encode())
    branch = Rollout(
        rollout.prompt.copy(),
        rollout.group_id,
        rollout.sample_index,
        rollout.seed,
        rollout.sampling,
        fork=Fork(calls, number, seed),
        structured=rollout.structured,
    )
    begun = [captured(rollout, replace(call)) for call in made[:calls]]
    cut_anew(branch, begun)
    if not rollout.calls:
        branch.calls = []  # they are found as the rollout's are
    return branch


@contextmanager
def repeats_shared_calls(rollout: Rollout) -> Iterator[None]:
    """Check that the agent that completes a branch repeats the calls before its fork.

    Raises:
        EpisodeError: if it made other ones.
    """
    if rollout.fork is None:  # most rollouts: do not go through their tokens
        yield
        return
    shared = _shared_calls(rollout, rollout.fork.calls)
    yield
    if rollout.completed and _shared_calls(rollout, rollout.fork.calls) != shared:
        raise EpisodeError(
            f"did not repeat the {len(shared)} calls of {rollout.group_id}/"
            f"{rollout.sample_index} before the fork, so it cannot continue from them; make "
            "the agent depend on nothing but its prompt and the models' answers"
        )


def _shared_calls(rollout: Rollout, count: int) -> list[tuple[list[int], list[int]]]:
    """Return the first ``count`` calls, as prompt and answer tokens."""
    calls = [captured(rollout, call) for call in rollout.model_calls()[:count]]
    return [(call.prompt_ids, call.completion.token_ids) for call in calls]
