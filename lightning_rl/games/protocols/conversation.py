"""Conversation: one interaction in words, an immutable value from which answers make the next."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from lightning_rl.errors import ConfigError
from lightning_rl.games.protocols.base import GO_ON, Protocol
from lightning_rl.games.protocols.scenario import Reading, Scenario, Seat
from lightning_rl.rollout import Message


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The schedule of one interaction: who speaks where in each round, and what agents argue for.

    ``channels[agent][round]`` are those that an agent speaks on, ``stances`` are 2 for deciders,
    and ``deciding[agent]`` are the rounds in which a decider's decision counts.
    """

    channels: dict[str, list[list[str]]]
    stances: dict[str, int]
    deciding: dict[str, list[int]]

    @classmethod
    def of(cls, protocol: Protocol, seed: int) -> "RoundPlan":
        """Return the plan of all rounds for this seed."""
        rounds = torch.arange(protocol.max_message_rounds)
        active = {
            (name, channel): protocol.is_active(name, channel, rounds, seed).tolist()
            for name in protocol.agent_names
            for channel in protocol.visible(name)
        }
        channels = {
            name: [[c for c in protocol.visible(name) if active[name, c][r]] for r in rounds]
            for name in protocol.agent_names
        }
        stances = {name: int(protocol.stance(name, seed)) for name in protocol.prover_names}
        deciding = {
            name: protocol.can_decide(rounds, seed, name).nonzero().flatten().tolist()
            for name in protocol.deciders
        }
        return cls(channels, stances | dict.fromkeys(protocol.deciders, GO_ON), deciding)

    def is_last(self, agent: str, round: int) -> bool:
        """Tell whether this is the last round in which an agent's decision counts."""
        return self.deciding.get(agent, [])[-1:] == [round]

    def speakers(self, round: int) -> list[str]:
        """Return the agents whose turn it is, in the protocol's order."""
        return [name for name, rounds in self.channels.items() if rounds[round]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an agent: its prompt, its answer, and how the answer was read.

    ``said`` is empty if the answer could not be read. ``decision`` is None for agents that do not
    decide; ``retries`` counts earlier answers of this turn that could not be read. ``guess``: the
    agent was asked only for a decision.
    """

    agent: str
    round: int
    messages: list[Message]
    answer: str
    said: Mapping[str, str]
    decision: int | None
    retries: int
    guess: bool = False


@dataclass(frozen=True)
class Conversation:
    """The state of an interaction. It is immutable: :meth:`after` returns the next.

    Create the first with :meth:`begin`. ``rewards`` are the sums over the rounds so far, by agent;
    ``decided`` are the decisions that counted so far, by agent (2: none), and ``decision`` is the
    final verdict. ``unread`` counts, by agent, the unreadable answers in this round of those that
    are asked again.
    """

    protocol: Protocol
    scenario: Scenario
    columns: Mapping[str, Any]
    seed: int
    schedule: RoundPlan
    rewards: Mapping[str, float]
    turns: tuple[Turn, ...] = ()
    round: int = 0
    decision: int | None = None
    decided: Mapping[str, int] = field(default_factory=dict)
    done: bool = False
    unread: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, protocol: Protocol, scenario: Scenario, columns: Mapping[str, Any], seed: int = 0
    ) -> "Conversation":
        """Return a conversation in which nothing was said yet.

        Args:
            protocol: who speaks when, and the rewards.
            scenario: what the agents are told, and how their answers are read.
            columns: the row of data that it is about.
            seed: determines all random choices.

        Raises:
            ConfigError: if the protocol pays for logits, which are not known for messages in words,
                or if the scenario has no prompt for one of its agents.
        """
        if protocol.logits_read:
            raise ConfigError(
                f"{type(protocol).__name__} pays for agents' logits, which are not known for "
                "agents that speak in words; use the protocol it wraps, or TensorDict agents"
            )
        scenario.check(protocol.agent_names)
        rewards = dict.fromkeys(protocol.agent_names, 0.0)
        schedule = RoundPlan.of(protocol, seed)
        return cls(protocol, scenario, columns, seed, schedule, rewards)._going_on()

    @property
    def label(self) -> int:
        """1 if accepting is right, else 0."""
        return self.scenario.label(self.columns)

    def asks(self) -> dict[str, list[Message]]:
        """Return the chat that each agent whose turn it is has to answer; {} once it is done."""
        return {agent: list(chat) for agent, chat in self._questions.items()}

    def after(self, answers: Mapping[str, str]) -> "Conversation":
        """Return the interaction after answers; agents that have not answered are still to answer.

        Args:
            answers: by agent, of those in :meth:`asks`.

        Raises:
            ValueError: if an agent answers that was not asked.
        """
        if strangers := answers.keys() - self._questions.keys():
            raise ValueError(
                f"{sorted(strangers)} answered, but in round {self.round} it is the turn of "
                f"{sorted(self._questions)}"
            )
        turns, unread = list(self.turns), dict(self.unread)
        for agent, answer in answers.items():
            tries = unread.pop(agent, 0)
            turn = self._read(agent, answer, tries)
            if turn is None:
                unread[agent] = tries + 1
            else:
                turns.append(turn)
        order = {name: index for index, name in enumerate(self.protocol.agent_names)}
        turns.sort(key=lambda turn: (turn.round, order[turn.agent]))
        return replace(self, turns=tuple(turns), unread=unread)._going_on()

    # ---------------------------------------------------------------- inside

    @cached_property
    def _questions(self) -> dict[str, list[Message]]:
        chats = {}
        for agent in self._asked():
            own = self._turns_of(agent)
            chats[agent] = self._guess_chat(own[-1]) if own else self._chat(agent)
        return chats

    def _asked(self) -> list[str]:
        """Return the agents that have yet to answer in this round."""
        if self.done:
            return []
        asked = []
        for agent in self.schedule.speakers(self.round):
            if self.decided.get(agent, GO_ON) != GO_ON:
                continue
            own = self._turns_of(agent)
            if not own or self._must_guess(own[-1]):
                asked.append(agent)
        return asked

    def _turns_of(self, agent: str) -> list[Turn]:
        """Return an agent's turns in this round: one, or two with a guess."""
        return [t for t in self.turns if t.round == self.round and t.agent == agent]

    def _must_guess(self, turn: Turn) -> bool:
        late = self.schedule.is_last(turn.agent, turn.round) and not turn.guess
        return self.scenario.forced_guess and late and turn.decision == GO_ON

    def _read(self, agent: str, answer: str, tries: int) -> Turn | None:
        """Return an answer as a turn; None if the agent is to be asked again."""
        guess = bool(self._turns_of(agent))
        said = self.scenario.read(self._seat(agent, self.round, guess), answer)
        if said is None and tries < self.scenario.retries:
            return None
        said = said or Reading({})
        decision = said.decision if agent in self.protocol.deciders else None
        chat = self._questions[agent]
        return Turn(agent, self.round, chat, answer, said.texts, decision, tries, guess)

    def _going_on(self) -> "Conversation":
        """Return the interaction at the next round in which an agent is asked, or once done."""
        now = self
        while not (now.done or now._asked()):
            now = now._next_round()
        return now

    def _next_round(self) -> "Conversation":
        protocol, now = self.protocol, (self.round, self.label, self.seed)
        decisions = {agent: self._decision_of(agent) for agent in protocol.deciders}
        done, paid = protocol.step(decisions, *now, self.decided)
        decided = protocol.decided(decisions, self.round, self.seed, self.decided)
        verdict = int(protocol.verdict(decided)) if bool(done) else GO_ON
        return replace(
            self,
            round=self.round + 1,
            rewards={name: earlier + float(paid[name]) for name, earlier in self.rewards.items()},
            decision=None if verdict == GO_ON else verdict,
            decided={agent: int(decision) for agent, decision in decided.items()},
            done=bool(done),
        )

    def _decision_of(self, agent: str) -> int:
        """Return an agent's decision in this round; 2 if it made none."""
        said = [turn.decision for turn in self._turns_of(agent) if turn.decision is not None]
        return said[-1] if said else GO_ON

    def _seat(self, agent: str, round: int, guess: bool = False) -> Seat:
        return Seat(
            agent,
            self.columns,
            self.schedule.stances[agent],
            round,
            self.protocol.max_message_rounds,
            self.schedule.channels[agent][round],
            self.schedule.is_last(agent, round),
            guess,
        )

    # ---------------------------------------------------------------- chats

    def _chat(self, agent: str) -> list[Message]:
        """Return all that an agent has read and answered, and what it reads now."""
        chat = self.scenario.opening(self._seat(agent, self.round))
        heard: list[str] = []
        # Of this round nothing: who speaks in it has not heard the others.
        before = [turn for turn in self.turns if turn.round < self.round]
        for round, turns in groupby(before, key=lambda turn: turn.round):
            said = list(turns)
            for own in said:
                if own.agent == agent:
                    chat = self._told(chat, heard, self._seat(agent, round))
                    chat.append({"role": "assistant", "content": own.answer})
                    heard = []
            heard += self._heard(agent, round, said)
        return self._told(chat, heard, self._seat(agent, self.round))

    def _guess_chat(self, turn: Turn) -> list[Message]:
        """Return the chat that asks an agent to decide that did not decide in its last turn."""
        cue = self.scenario.cue(self._seat(turn.agent, turn.round, guess=True))
        answered = {"role": "assistant", "content": turn.answer}
        return [*turn.messages, answered, {"role": "user", "content": cue}]

    def _told(self, chat: list[Message], heard: list[str], seat: Seat) -> list[Message]:
        """Append a user message to a chat, or extend the opening's if the chat ends with that."""
        parts = [*heard, self.scenario.cue(seat)]
        if chat and chat[-1]["role"] == "user":
            parts.insert(0, chat[-1]["content"])
            chat = chat[:-1]
        return [*chat, {"role": "user", "content": "\n".join(filter(None, parts))}]

    def _heard(self, agent: str, round: int, turns: Sequence[Turn]) -> list[str]:
        """Return what an agent reads of a round; text repeated on several channels appears once."""
        seat = self._seat(agent, round)
        channels = self.protocol.visible(agent)
        if self.scenario.shuffle_channels:
            random.Random(f"{self.seed}/{round}/{agent}").shuffle(channels)
        read = (
            self.scenario.heard(seat, turn.agent, channel, turn.said[channel])
            for channel in channels
            for turn in turns
            if turn.agent != agent and channel in turn.said
        )
        return list(dict.fromkeys(filter(None, read)))
