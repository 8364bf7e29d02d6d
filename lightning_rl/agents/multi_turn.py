"""MultiTurn: the model and an environment take turns."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import (
    Agent,
    Environment,
    EnvironmentFactory,
    Reply,
    append_given,
    end,
    generate_turn,
    is_over,
    record_turns,
    recorded_turns,
    require_seconds,
    resolve,
    room,
    within,
)
from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.config.arguments import configurable
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import (
    Message,
    Picture,
    Placed,
    Prompt,
    Rollout,
    RolloutStatus,
    as_text,
    of_whole_characters,
)
from lightning_rl.run.loop.stacks import name_crashes
from lightning_rl.run.processes.exits import EndsProcess, UsesSignals, function_called_here
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.messages import pictures_of


@configurable
class MultiTurn(Agent):
    """Lets an environment answer each turn, until it is done or a limit is reached.

    Rollouts are exact to the token: what the model writes is appended unchanged and never encoded
    again; the environment's answer is encoded alone and has no loss. ``finish_reason`` becomes
    ``stop`` (the environment is done), ``length`` (``sampling.max_tokens``, which counts all tokens
    after the prompt, or the engine's length), ``max_turns`` or ``max_seconds``. All of these are
    completed rollouts: ``environment_reward`` is the environment's reward until then, and ``calls``
    has the reward of each turn. The environment does not see a last turn that a token limit cut
    off.

    A rollout that already holds turns is resumed: a new environment answers them again, without
    generation, and then the remaining turns are played. ``max_seconds`` starts anew.

    Args:
        environment: makes the environment of one rollout from its prompt: an
            :class:`Environment`'s class (in YAML with ``init_args``), or any callable.
        max_turns: maximum number of the model's turns.
        max_turn_tokens: maximum tokens in one turn; a turn that long is over. None: no limit.
        max_seconds: maximum wall time of one rollout; the turn being generated is then lost.
        min_tokens: finished rollouts with fewer tokens after the prompt are SKIPPED.
        allow_rewrites: train on chats even if the chat template rewrites earlier turns.
        picture_limits: limits of pictures that the environment shows in its messages.

    Raises:
        ConfigError: for values out of range.
    """

    within_max_tokens = True

    def __init__(
        self,
        environment: EnvironmentFactory,
        max_turns: int = 8,
        max_turn_tokens: int | None = None,
        max_seconds: float | None = None,
        min_tokens: int = 0,
        allow_rewrites: bool = False,
        picture_limits: PictureLimits = PictureLimits(),
    ) -> None:
        require_at_least(1, max_turns=max_turns, max_turn_tokens=max_turn_tokens)
        require_at_least(0, min_tokens=min_tokens)
        require_seconds(max_seconds)
        self.environment = environment
        self.max_turns = max_turns
        self.max_turn_tokens = max_turn_tokens
        self.max_seconds = max_seconds
        self.min_tokens = min_tokens
        self.allow_rewrites = allow_rewrites
        self.picture_limits = picture_limits
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._template: TurnTemplate | None = None

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._template = tokenizer, None

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        try:
            played = self._play(rollout, engine, sampling)
            reason = await within(self.max_seconds, played, "max_seconds")
        except _EnvironmentFailure as failure:
            rollout.fail(str(failure))
            return rollout
        end(rollout, reason)
        count = len(rollout.token_ids)
        if rollout.completed and count < self.min_tokens:
            rollout.status = RolloutStatus.SKIPPED
            rollout.error = f"{count} tokens after the prompt; min_tokens={self.min_tokens}"
        return rollout

    async def _play(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> str:
        """Play until something ends the rollout, and return the reason."""
        if self._tokenizer is None:
            raise ConfigError("MultiTurn has no tokenizer yet; call configure(tokenizer) first")
        name_crashes()  # of the environment
        chat = None if isinstance(rollout.prompt.prompt, str) else self._chat_of(rollout.prompt)
        with _blaming("environment"):
            environment = self.environment(rollout.prompt.copy())
        episode = _Episode(self, rollout, environment, self._tokenizer, chat)
        try:
            return await episode.play(engine, sampling)
        finally:
            record_turns(rollout, episode.turn_ended_by, episode.rewards, episode.states)
            with _blaming(f"{type(environment).__name__}.close"):
                await resolve(environment.close())

    def _chat_of(self, prompt: Prompt) -> TurnTemplate:
        """Return the template that continues a row's chat."""
        assert self._tokenizer is not None
        if self._template is None:  # text needs none
            self._template = TurnTemplate(self._tokenizer)
        check = partial(
            TurnTemplate.check, reply=[_user("Reply.")], allow_rewrites=self.allow_rewrites
        )
        return self._template.of_row(prompt.columns, check)


class _Episode:
    """One rollout, its environment, and their exchange."""

    def __init__(
        self,
        limits: MultiTurn,
        rollout: Rollout,
        environment: Environment,
        tokenizer: PreTrainedTokenizerBase,
        chat: TurnTemplate | None,
    ) -> None:
        self.limits = limits
        self.rollout = rollout
        self.environment = environment
        self.tokenizer = tokenizer
        self.ends = end_tokens_of(tokenizer)
        self.chat = chat
        self.messages: list[Message] = []
        first = len(rollout.rows[0].prompt_ids)
        self.recorded_pictures = [p for p in rollout.rows[0].placed if p.start >= first]
        self.rewards: list[float] = []
        self.states: list[str | None] = [as_text(rollout.prompt.prompt)]
        self.turn_ended_by = "stop"
        rollout.environment_reward = 0.0
        if chat is not None:  # of a text prompt the pipeline decodes all tokens
            rollout.completion = self.messages

    async def play(self, engine: Engine, sampling: Sampling) -> str:
        """Play turns, beginning with those the rollout already holds; return why they ended."""
        recorded = recorded_turns(self.rollout)
        for number in range(self.limits.max_turns):
            turn, answer = recorded[number] if number < len(recorded) else ([], [])
            cut = None
            if not answer and not self._is_over(turn, sampling):
                turn, cut = await self._write(turn, engine, sampling)
            if turn:
                self.messages.append({"role": "assistant", "content": self._said(turn, number)})
            if cut is not None:
                return cut
            reply = await self._ask(self._said(turn, number))
            with _blaming(f"{type(self.environment).__name__}.step"):
                messages, pictures = pictures_of(_as_messages(reply), self.limits.picture_limits)
            self.messages += messages
            if reply.done:
                return "stop"
            if number == self.limits.max_turns - 1:
                break  # the answer would have no reader
            given, placed = self._encoded(turn, reply, messages, pictures)
            if answer:
                self._require_same(given, pictures, answer, number)
            elif len(given) >= room(self.rollout, engine, sampling):
                return "length"
            else:
                append_given(self.rollout, given, placed)
        return "max_turns"

    async def _write(
        self, turn: list[int], engine: Engine, sampling: Sampling
    ) -> tuple[list[int], str | None]:
        """Let the model finish a turn; return it, with the reason if it could not, else None."""
        left, longest = room(self.rollout, engine, sampling), self.limits.max_turn_tokens
        if longest is not None:
            left = min(left, longest - len(turn))
        if left < 1:
            return turn, "length"
        completion = await generate_turn(self.rollout, engine, sampling, left, len(turn))
        turn = turn + completion.token_ids
        over = completion.finish_reason == "stop" or len(turn) == longest
        self.turn_ended_by = "stop" if over else completion.finish_reason
        return turn, None if over else completion.finish_reason

    def _is_over(self, turn: list[int], sampling: Sampling) -> bool:
        """Tell whether a turn found in a rollout was complete."""
        if not turn:
            return False
        longest = self.limits.max_turn_tokens
        return is_over(turn, sampling, self.tokenizer) or len(turn) == longest

    def _said(self, turn: list[int], number: int) -> str:
        """Return a turn as text, with what the prompt has begun of the first."""
        return ("" if number else self.rollout.prompt.begun) + self._text(turn)

    async def _ask(self, turn: str) -> Reply:
        name = f"{type(self.environment).__name__}.step"
        with _blaming(name):
            reply = await resolve(self.environment.step(turn))
            if not isinstance(reply, Reply):
                raise TypeError(f"returned {reply!r:.80}; expected a Reply")
            if not math.isfinite(reply.reward):
                raise ValueError(f"returned reward={reply.reward}; it must be finite")
            if not isinstance(reply.done, bool | np.bool_):
                raise TypeError(f"returned done={reply.done!r:.80}; it must be True or False")
            if not reply.observation and not reply.done:
                raise ValueError("returned no observation; the model needs one unless done=True")
            if self.chat is None and not isinstance(reply.observation, str):
                raise TypeError("returned messages for a text prompt; return text")
            if not isinstance(reply.state, str | None):
                raise TypeError(f"returned state={reply.state!r:.80}; it must be a string or None")
            reply = replace(reply, observation=of_whole_characters(reply.observation))
        assert self.rollout.environment_reward is not None
        self.rollout.environment_reward += reply.reward
        self.rewards.append(float(reply.reward))
        self.states.append(reply.state)
        return reply

    def _encoded(
        self, turn: list[int], reply: Reply, messages: list[Message], pictures: list[Picture]
    ) -> tuple[list[int], list[Placed]]:
        """Return the tokens that the model reads after its turn, and the pictures among them."""
        with _blaming(f"{type(self.environment).__name__}.step"):
            if self.chat is not None:
                return self.chat.seen_suffix(turn, messages, pictures)
            encoded = self.tokenizer(reply.observation, add_special_tokens=False)["input_ids"]
            if not encoded:
                raise ValueError(f"returned {reply.observation!r:.80}, which has no tokens")
            return list(encoded), []

    def _require_same(
        self, given: list[int], pictures: list[Picture], answer: list[int], number: int
    ) -> None:
        known = self.recorded_pictures[: len(pictures)]
        del self.recorded_pictures[: len(pictures)]
        if given != answer or pictures != [picture for _, picture in known]:
            raise _EnvironmentFailure(
                f"{type(self.environment).__name__}.step answered turn {number + 1} of a resumed "
                f"rollout with {self._text(given)!r:.80}, but before with "
                f"{self._text(answer)!r:.80}; make it deterministic, e.g. draw from "
                "random.Random(prompt.id)"
            )

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(self.ends.cut(token_ids), skip_special_tokens=True))


class _EnvironmentFailure(Exception):
    """A user's environment raised, or returned something unusable."""


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turn an environment's errors into failed rollouts, while the engine's errors end the run.

    This covers attempts to end the process, or to use signals such as an alarm.
    """
    try:
        with function_called_here():
            yield
    except (Exception, EndsProcess, UsesSignals) as error:
        raise _EnvironmentFailure(f"{what}: {type(error).__name__}: {error}") from error


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _as_messages(reply: Reply) -> list[Message]:
    """Return the observation as chat messages; none if it is empty."""
    if not isinstance(reply.observation, str):
        return list(reply.observation)
    return [_user(reply.observation)] if reply.observation else []
