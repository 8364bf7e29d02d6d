"""Agents: produce one rollout from a prompt, an engine and perhaps an environment."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.rows import drop_unasked
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.data.routing import extended
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling, request_seed, seed_of
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Message, Placed, Prompt, Rollout, RolloutStatus

T = TypeVar("T")


class Agent(ABC):
    """Fills a rollout's tokens by talking to an engine.

    One object runs many rollouts at the same time: keep a rollout's state in ``run``'s own
    variables, or in the rollout.

    ``chat_options``: extra variables for the tokenizer's chat template when it renders prompts.
    """

    chat_options: Mapping[str, Any] = {}
    within_max_tokens: bool = False
    """True if ``run`` sends no request longer than the prompt and ``sampling.max_tokens``; a
    subclass with another ``run`` says so anew.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "run" in vars(cls) and "within_max_tokens" not in vars(cls):
            cls.within_max_tokens = False

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Receive the tokenizer before the first rollout; agents that encode or decode keep it.

        Raises:
            ConfigError: if the agent cannot work with this tokenizer or its chat template.
        """

    @abstractmethod
    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        """Extend ``rollout`` in place until it is completed or aborted, and return it."""

    def close(self) -> None:
        """Free what the agent holds besides its rollouts, such as processes, once a run is over.

        The agent may run again afterwards.
        """


class SingleTurn(Agent):
    """One prompt, one completion."""

    within_max_tokens = True

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        prompt = rollout.prompt
        completion = await completion_of(
            engine, prompt.token_ids, prompt.placed, sampling, rollout.own_seed
        )
        append_written(rollout, completion)
        end(rollout, completion.finish_reason)
        return rollout


async def completion_of(
    engine: Engine,
    token_ids: Sequence[int],
    pictures: Sequence[Placed],
    sampling: Sampling,
    seed: int,
) -> Completion:
    """Let an engine continue a text, with or without pictures."""
    if pictures:
        return await engine.look(pictures, token_ids, sampling, seed)
    return await engine.generate(token_ids, sampling, seed)


def continuation_seed(seed: int, position: int) -> int:
    """Return the 63-bit seed of a request that continues a completion at ``position`` tokens.

    At position 0 it is the rollout's own seed, so a first turn equals a single-turn completion. It
    depends on nothing else, so interrupting a rollout between two turns does not change its end.
    """
    if position == 0:
        return seed
    return seed_of(f"{seed}/{position}".encode())


def room(rollout: Rollout, engine: Engine, sampling: Sampling) -> int:
    """Return how many tokens may still follow; ``max_tokens`` counts all tokens after the prompt.

    It is negative if there are too many already.
    """
    budget = min(sampling.max_tokens, engine.max_length - len(rollout.prompt.token_ids))
    return budget - len(rollout.token_ids)


async def generate_turn(
    rollout: Rollout, engine: Engine, sampling: Sampling, max_tokens: int, begun: int = 0
) -> Completion:
    """Let the model write at most ``max_tokens`` tokens, and append them unchanged.

    ``begun`` is the number of tokens this turn already has; they count towards ``min_tokens``.
    """
    least = min(max_tokens, max(0, sampling.min_tokens - begun))
    completion = await completion_of(
        engine,
        rollout.prompt.token_ids + rollout.token_ids,
        rollout.rows[0].placed,
        replace(sampling, max_tokens=max_tokens, min_tokens=least),
        continuation_seed(rollout.own_seed, len(rollout.token_ids)),
    )
    append_written(rollout, completion)
    return completion


def is_over(turn: list[int], sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a turn that a resumed rollout holds had ended: by an end token, or by a stop
    string, which may end inside of the last token.
    """
    ends = end_tokens_of(tokenizer)
    if ends.ended(turn) or not (turn and sampling.stop):
        return ends.ended(turn)
    text, before = (str(tokenizer.decode(t, skip_special_tokens=True)) for t in (turn, turn[:-1]))
    known = len(before.rstrip("\ufffd"))  # less what is no whole character yet
    return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in sampling.stop)


def append_written(rollout: Rollout, completion: Completion) -> None:
    """Append what the model wrote to the row that continues the prompt."""
    row = rollout.rows[0]
    row.append_written(completion.token_ids, completion.logprobs, completion.versions)
    row.routed_experts = extended(row.routed_experts, completion.routed_experts)


def append_given(rollout: Rollout, token_ids: Sequence[int], placed: Sequence[Placed] = ()) -> None:
    """Append tokens that the model reads but did not write: no loss, no logprob, no version.

    ``placed`` are the pictures among them; their places count from the first of these tokens.
    """
    rollout.rows[0].append_given(token_ids, placed)


def end(rollout: Rollout, reason: str) -> None:
    """Record why a rollout ended: COMPLETED, or ABORTED by the engine or before any token."""
    drop_unasked(rollout)
    rollout.finish_reason = reason
    aborted = any(call.finish_reason == "abort" for call in rollout.calls)
    aborted = aborted or reason == "abort" or not rollout.length
    rollout.status = RolloutStatus.ABORTED if aborted else RolloutStatus.COMPLETED


async def within(seconds: float | None, work: Awaitable[T], late: T) -> T:
    """Return a result; ``late`` if it took longer than ``seconds``."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # the engine's own
            raise
        return late


def require_seconds(max_seconds: float | None) -> None:
    """Refuse a time limit in which no rollout can end.

    Raises:
        ConfigError: unless it is > 0 or None.
    """
    if max_seconds is not None and not max_seconds > 0:
        raise ConfigError(f"max_seconds={max_seconds} must be > 0 (None: no limit)")


def recorded_turns(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """Return a rollout's turns: the model's tokens, and the given tokens that follow them.

    Only the last turn's second list may be empty.
    """
    runs = [
        [token for token, _ in run]
        for _, run in groupby(
            zip(rollout.token_ids, rollout.loss_mask, strict=True), key=lambda pair: pair[1]
        )
    ]
    answers = runs[1::2] + [[]] * (len(runs) % 2)
    return list(zip(runs[0::2], answers, strict=True))


def record_turns(
    rollout: Rollout,
    last_reason: str,
    rewards: Sequence[float] = (),
    states: Sequence[str | None] = (),
) -> None:
    """Record a rollout's turns as its calls, replacing those of an earlier attempt.

    Args:
        rollout: each of its turns but the last is followed by given tokens.
        last_reason: what ended the last turn; earlier turns ended by themselves.
        rewards: rewards of the first turns; the remaining turns get none.
        states: names of the states in which the first turns were asked.
    """
    rollout.calls = []  # they are recomputed
    calls = rollout.model_calls()
    shared = 0 if rollout.fork is None else rollout.fork.calls
    turns = zip_longest(calls, rewards[: len(calls)], states[: len(calls)])
    for number, (call, reward, state) in enumerate(turns):
        seed = rollout.seed if number < shared else rollout.own_seed
        call.seed = continuation_seed(seed, call.start)
        call.reward, call.state = reward, state
    if calls:
        calls[-1].finish_reason = last_reason
    rollout.calls = calls


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to one turn.

    Args:
        observation: what the model reads next: text, or chat messages; for a chat prompt, text
            becomes one user message. Nobody reads the observation of a reply that is ``done``, so
            it may be left out.
        reward: the reward of this turn; a rollout's ``environment_reward`` is the sum over turns.
        done: whether the rollout ends here.
        state: a name for the model's next state, by which :class:`GiGPO` compares what the rollouts
            of a group do in the same state: two turns share a state if nothing that matters from
            there on differs. The first turn's state is the prompt as text (:func:`as_text`).
            None: no name.
    """

    observation: str | list[Message] = ""
    reward: float = 0.0
    done: bool = False
    state: str | None = None


class Environment(ABC):
    """Answers the turns of one rollout: each rollout gets its own object, made from its row.

    Whatever it raises marks that rollout FAILED, with the error kept, and the run continues. It
    must be deterministic: to resume an interrupted rollout, a new environment answers the recorded
    turns again, and must give the same answers. Draw random numbers from
    ``random.Random(prompt.id)``, for example.
    """

    def __init__(self, prompt: Prompt) -> None:
        """``prompt.columns`` holds the row's fields; further parameters are settings for YAML.

        The prompt is a copy, which the environment may change.
        """

    @abstractmethod
    def step(self, turn: str) -> Reply | Awaitable[Reply]:
        """Answer the model's turn (text without special tokens); plain or ``async``.

        All other rollouts wait while a plain method runs, so one that waits should be ``async``.
        """

    def close(self) -> Any:
        """Free what the rollout used, however it ended; plain or ``async``, called only once."""


EnvironmentFactory = Callable[[Prompt], Environment]
"""An environment's class, or any callable that makes one from a prompt."""


async def resolve(value: Any) -> Any:
    """Return a method's result, awaiting it if the method is ``async``."""
    return await value if inspect.isawaitable(value) else value


def new_rollouts(
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int,
    iteration: int,
    first_place: int = 0,
) -> list[Rollout]:
    """Return empty rollouts, group by group, each with a seed that reproduces it.

    ``iteration`` is the number of finished iterations, or negative for rollouts outside training
    (evaluations, probes); ``first_place`` is the number of groups already issued for it.
    """
    return [
        new_rollout(prompt, index, sampling, seed, iteration, position)
        for position, prompt in enumerate(prompts, first_place)
        for index in range(group_size)
    ]


def new_rollout(
    prompt: Prompt, index: int, sampling: Sampling, seed: int, iteration: int, place: int
) -> Rollout:
    """Return the empty rollout at an index of the group at a place; see :func:`new_rollouts`."""
    named = iteration + 1 if iteration >= 0 else iteration  # counted from 1, as everywhere
    return Rollout(
        prompt=prompt.copy(),
        # A prompt drawn twice in one iteration makes two groups: tell them apart by place.
        group_id=f"{named}/{place}/{prompt.key}",
        sample_index=index,
        seed=request_seed(seed, f"{place}/{prompt.id}", index, iteration),
        sampling=sampling.distribution,
        structured=sampling.structured_outputs is not None,
    )
