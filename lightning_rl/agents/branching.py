"""Branching: rollouts are forked at some of their calls, and continue differently from there."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent
from lightning_rl.agents.rows import captured, cut_anew
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling, seed_of
from lightning_rl.errors import ConfigError, EpisodeError, require_at_least
from lightning_rl.rollout import Fork, Rollout


class ForkPoints(ABC):
    """Chooses before which of a rollout's calls it is forked.

    The choice must not depend on what the model wrote from there on: else a call would be credited
    for having been chosen.
    """

    @abstractmethod
    def chosen(self, rollout: Rollout, number: int) -> bool:
        """Whether a completed rollout is forked before its ``number``-th call; the second is 2.

        Asked of the same rollout again, it must say the same.
        """


@configurable
@dataclass(frozen=True)
class EveryCall(ForkPoints):
    """Before each call from ``first`` on, or each ``step``-th of them; the second is 2.

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
class TheseCalls(ForkPoints):
    """Before the calls with these ``numbers``, of as many as a rollout has; the second is 2.

    Raises:
        ConfigError: for none, or one below 2: the first is made as often as a group has rollouts.
    """

    numbers: Sequence[int]

    def __post_init__(self) -> None:
        if not self.numbers or min(self.numbers) < 2:
            raise ConfigError(
                f"TheseCalls(numbers={list(self.numbers)}) must name calls from 2 on; for more "
                "answers to the prompt itself raise group_size"
            )

    def chosen(self, rollout: Rollout, number: int) -> bool:
        return number in self.numbers


@configurable
@dataclass(frozen=True)
class RandomCalls(ForkPoints):
    """Before each call but the first with this chance, decided by the rollout's seed.

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
class Branching(Agent):
    """Forks another agent's rollouts: from chosen calls on, it continues ``k`` times more.

    A branch begins with the very calls that its rollout made before, token by token, without asking
    the engine, and then has seeds of its own. It is a rollout of the same group, with a reward of
    its own; only what is its own is trained on. So the calls of a group are a tree, and what is
    expected from a state on is known from what followed it there: that is what :class:`TreeRLOO`
    credits calls by. Evaluations do not branch.

    The agent must go on with what a rollout holds, as all of this library do, and ask for the same
    before the fork: a program that does not (it has looked at a clock, say) costs the branch, which
    is FAILED with the reason.

    Args:
        agent: whose rollouts are forked; it calls models more than once.
        k: continuations of each chosen call, beside the rollout's own.
        at: before which calls.

    Raises:
        ConfigError: unless ``k`` >= 1, and for an agent that branches itself.
    """

    def __init__(self, agent: Agent, k: int = 1, at: ForkPoints = EveryCall()) -> None:
        require_at_least(1, k=k)
        if isinstance(agent, Branching):
            raise ConfigError("agent=Branching cannot branch once more; raise its k instead")
        self.agent = agent
        self.k = k
        self.at = at

    @property
    def chat_options(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The agent's."""
        return self.agent.chat_options

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.agent.configure(tokenizer)

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        shared = _shared_calls(rollout)
        await self.agent.run(rollout, engine, sampling)
        if rollout.completed and _shared_calls(rollout) != shared:
            raise EpisodeError(
                f"did not ask for the same {len(shared)} calls again as {rollout.group_id}/"
                f"{rollout.sample_index} had made, so there is no going on from them; what an "
                "agent does may depend on its prompt and on what models answered, and on nothing "
                "else"
            )
        return rollout

    def branches(self, rollout: Rollout) -> list[Rollout]:
        if rollout.fork is not None:
            return []
        return [
            forked(rollout, calls, number)
            for calls in range(1, len(rollout.model_calls()))
            if self.at.chosen(rollout, calls + 1)
            for number in range(self.k)
        ]

    def close(self) -> None:
        self.agent.close()


def forked(rollout: Rollout, calls: int, number: int) -> Rollout:
    """A rollout that begins with the first ``calls`` calls of another, and continues from there.

    Args:
        rollout: the one it branches off from; may be recorded. Nothing is shared with it.
        calls: fewer than all; 0 starts over from the prompt.
        number: distinguishes its seeds from those of other branches at the same place.

    Raises:
        EpisodeError: if the rollout has too few calls.
    """
    made = rollout.model_calls()
    if not 0 <= calls < len(made):
        raise EpisodeError(
            f"rollout {rollout.id!r} has no call {calls + 1} to be forked before; it has "
            f"{len(made)}, counted from 1"
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


def _shared_calls(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """The calls before the fork, with their answers."""
    count = 0 if rollout.fork is None else rollout.fork.calls
    calls = [captured(rollout, call) for call in rollout.model_calls()[:count]]
    return [(call.prompt_ids, call.completion.token_ids) for call in calls]
