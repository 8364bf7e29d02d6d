"""Protocol: who speaks when, which agents decide, and their rewards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite

REJECT = 0
"""The decision to reject."""
ACCEPT = 1
"""The decision to accept."""
GO_ON = 2
"""The value of a decision that has not been made yet."""
VERIFIER = "verifier"
"""The name of the agent that decides, unless a protocol says otherwise."""

Rounds = Tensor | int
"""A round, counted from 0, or one per element of a batch."""
Decisions = Mapping[str, Rounds]
"""Decisions by agent: 0 rejects, 1 accepts, 2 goes on."""


@configurable
class Protocol(ABC):
    """Determines who speaks when, when a decision counts, and what it pays.

    A protocol does not know what messages are. Rounds, seeds, decisions and labels are numbers, or
    tensors of one shape (*B,) with one element per interaction, for many interactions at once.
    Names and rewards follow Hammond and Adam-Day 2025, "Neural Interactive Proofs".

    Args:
        max_message_rounds: rounds after which an interaction ends, with or without a decision.
        min_message_rounds: the first round, counted from 1, in which a decision counts.
        turn_reward: the reward of a decider for a turn without a decision.
        shared_reward: provers get the deciders' reward: the mean, if there are several.
        random_stances: for half of the seeds all provers argue for the opposite, and are paid so.

    Raises:
        ConfigError: if there is less than one round, if the minimum exceeds the maximum, or if a
            decider is not one of the protocol's agents.
    """

    agent_names: Sequence[str]
    deciders: Sequence[str] = (VERIFIER,)
    """Agents that decide, each once. The interaction ends when all have; () if nobody decides."""
    message_channel_names: Sequence[str] = ("main",)
    agent_channel_visibility: Sequence[tuple[str, str]]
    """Pairs of an agent and a channel that it can read."""
    rejecting: Sequence[str] = ()
    """Provers that argue for rejecting, and are paid for it; the others argue for accepting."""
    logits_read: Sequence[str] = ()
    """Agents whose logits, besides their messages, determine rewards."""

    def __init__(
        self,
        max_message_rounds: int,
        min_message_rounds: int,
        turn_reward: float = 0.0,
        shared_reward: bool = False,
        random_stances: bool = False,
    ) -> None:
        require_at_least(1, max_message_rounds=max_message_rounds)
        require_at_least(0, min_message_rounds=min_message_rounds)
        require_finite(turn_reward=turn_reward)
        if min_message_rounds > max_message_rounds:
            raise ConfigError(
                f"{type(self).__name__}(min_message_rounds={min_message_rounds}) must be <= "
                f"max_message_rounds={max_message_rounds}; lower it"
            )
        self.max_message_rounds = max_message_rounds
        self.min_message_rounds = min_message_rounds
        self.turn_reward = turn_reward
        self.shared_reward = shared_reward
        self.random_stances = random_stances
        if strangers := sorted({*self.deciders} - {*self.agent_names}):
            raise ConfigError(
                f"{type(self).__name__}.deciders names {strangers[0]!r}, but its agents are "
                f"{', '.join(self.agent_names)}; set deciders to some of these, or to () for nobody"
            )
        rounds = torch.arange(max_message_rounds)
        for agent in self.deciders:
            if not bool(self.can_decide(rounds, agent=agent).any()):
                raise ConfigError(
                    f"{type(self).__name__}(max_message_rounds={max_message_rounds}, "
                    f"min_message_rounds={min_message_rounds}) leaves the {agent} no round to "
                    "decide in; raise max_message_rounds, or lower min_message_rounds"
                )

    # ---------------------------------------------------------------- the schedule

    @abstractmethod
    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        """Tell whether an agent speaks on a channel, (*B,); ``seed`` determines random choices."""

    def speaks(self, agent: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        """Tell whether an agent is active on any channel, (*B,)."""
        told = [self.is_active(agent, c, round, seed) for c in self.visible(agent)]
        return reduce(or_, told) if told else torch.zeros_like(torch.as_tensor(round)) > 0

    def visible(self, agent: str) -> list[str]:
        """Return the channels that an agent can read."""
        return [channel for name, channel in self.agent_channel_visibility if name == agent]

    @property
    def prover_names(self) -> list[str]:
        """All agents that do not decide."""
        return [name for name in self.agent_names if name not in self.deciders]

    # ---------------------------------------------------------------- decisions

    def can_decide(self, round: Rounds, seed: Rounds = 0, agent: str | None = None) -> Tensor:
        """Tell whether a decision of an agent (None: the first of ``deciders``) counts, (*B,)."""
        own = self.has_turn(round, seed, agent)
        return own & (torch.as_tensor(round) >= self.min_message_rounds - 1)

    def has_turn(self, round: Rounds, seed: Rounds = 0, agent: str | None = None) -> Tensor:
        """Tell whether it is the turn of a decider (None: the first of ``deciders``), (*B,)."""
        return self.speaks(self.deciders[0] if agent is None else agent, round, seed)

    def decided(
        self,
        decisions: Decisions,
        round: Rounds,
        seed: Rounds = 0,
        earlier: Decisions | None = None,
    ) -> dict[str, Tensor]:
        """Return what each of ``deciders`` has decided by the end of a round, (*B,); 2 if nothing
        yet.

        Args:
            decisions: decisions made in this round; an agent decides once, so later decisions are
                ignored, and an agent that is left out has decided nothing.
            round: the round that they were made in.
            seed: the interaction's seed.
            earlier: what this method returned for the previous round; None: nothing was decided.
        """
        result = {}
        for agent in self.deciders:
            now = torch.as_tensor(decisions.get(agent, GO_ON))
            counted = torch.where(self.can_decide(round, seed, agent), now, GO_ON)
            before = _of(agent, earlier)
            result[agent] = torch.where(before == GO_ON, counted, before)
        return result

    def verdict(self, decided: Decisions) -> Tensor:
        """Return the majority of all decisions, (*B,); 2 if there is none."""
        told = [torch.as_tensor(decided[agent]) for agent in self.deciders]
        votes = sum(
            ((one == ACCEPT).long() - (one == REJECT).long() for one in told), torch.tensor(0)
        )
        return torch.where(votes > 0, ACCEPT, torch.where(votes < 0, REJECT, GO_ON))

    def step(
        self,
        decisions: Decisions,
        round: Rounds,
        label: Rounds,
        seed: Rounds = 0,
        earlier: Decisions | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return whether the round was the last, (*B,), and each agent's reward for it, (*B,).

        A round is the last when all of ``deciders`` have decided. Each is paid 1 for a right
        decision in the round it makes it, and -1 for a wrong one, or for having made none by the
        last round; provers are paid in the last round, for the verdict.

        Args:
            decisions: by agent, 0 to reject, 1 to accept, 2 to go on; only those of ``deciders``
                count.
            round: the round that they were made in.
            label: 1 if accepting is right, else 0.
            seed: the interaction's seed.
            earlier: what :meth:`decided` returned for the previous round; None: nothing was
                decided.
        """
        now, right = torch.as_tensor(round), torch.as_tensor(label)
        before = {agent: _of(agent, earlier) for agent in self.deciders}
        after = self.decided(decisions, round, seed, earlier)
        last = now >= self.max_message_rounds - 1
        paid = {}
        for agent, decision in after.items():
            verdict = torch.where(decision == right, 1.0, -1.0)
            turn = self.turn_reward * self.has_turn(now, seed, agent)
            earned = torch.where(decision != GO_ON, verdict, torch.where(last, -1.0, turn))
            paid[agent] = torch.where(before[agent] == GO_ON, earned, 0.0)
        done = last | _all_decided(after)
        ends = done & ~_all_decided(before)
        verdict = torch.where(ends, self.verdict(after), GO_ON)
        shared = sum(paid.values(), torch.where(last, 0.0, 0.0)) / max(1, len(paid))
        return done, paid | self.prover_rewards(verdict, shared, seed)

    def logit_rewards(
        self,
        logits: Mapping[str, Sequence[Tensor]],
        round: Rounds,
        seed: Rounds = 0,
        earlier: Decisions | None = None,
    ) -> dict[str, Tensor]:
        """Return further rewards of agents for a round, (*B,), that depend on logits; none by
        default.

        Args:
            logits: by agent, for all in ``logits_read``: of its message (*B, M) and its decision
                (*B, 3).
            round: the round that they were made in.
            seed: the interaction's seed.
            earlier: what :meth:`decided` returned for the previous round; None: nothing was
                decided.
        """
        return {}

    def prover_rewards(self, decided: Tensor, paid: Tensor, seed: Rounds = 0) -> dict[str, Tensor]:
        """Return each prover's reward for a round, (*B,): 1 if the verdict is what it argues for.

        Args:
            decided: the verdict in the round that ends the interaction, else 2.
            paid: the mean reward of the deciders in the round.
            seed: the interaction's seed.
        """
        if self.shared_reward:
            return dict.fromkeys(self.prover_names, paid)
        return {name: (decided == self.stance(name, seed)).float() for name in self.prover_names}

    def stance(self, prover: str, seed: Rounds = 0) -> Tensor:
        """Return the decision that a prover argues for, (*B,): 0 to reject, 1 to accept."""
        turned = drawn(seed, 2) if self.random_stances else torch.zeros_like(torch.as_tensor(seed))
        return (REJECT if prover in self.rejecting else ACCEPT) ^ turned


def _of(agent: str, earlier: Decisions | None) -> Tensor:
    """Return what an agent had decided before, (*B,)."""
    return torch.as_tensor((earlier or {}).get(agent, GO_ON))


def _all_decided(decided: Mapping[str, Tensor]) -> Tensor:
    """Return whether all deciders have decided, (*B,); False if nobody decides."""
    told = [decision != GO_ON for decision in decided.values()]
    return reduce(and_, told) if told else torch.tensor(False)


_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def drawn(seed: Tensor | int, count: int) -> Tensor:
    """Return the number in [0, ``count``) that a seed (*B,) maps to; it is uniform over seeds.

    It is the first number of SplitMix64 (Steele et al. 2014), without its highest bit, modulo
    ``count``.
    """
    mixed = torch.as_tensor(seed) + _signed(_GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    mixed = mixed ^ _shifted(mixed, 31)
    return (mixed & (2**63 - 1)) % count


def _signed(number: int) -> int:
    """Return the int64 with the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros from the left."""
    return (number >> bits) & (2 ** (64 - bits) - 1)
