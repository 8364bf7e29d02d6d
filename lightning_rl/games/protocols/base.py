"""Protocol: the schedule of an interaction about which agents decide, and its rewards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.games.protocols.chance import drawn

REJECT = 0
"""The verifier's decision that it is not so."""
ACCEPT = 1
"""The verifier's decision that it is so."""
GO_ON = 2
"""What the verifier says that has not decided yet."""
VERIFIER = "verifier"
"""The name of the agent that decides, in protocols that do not say otherwise."""

Rounds = Tensor | int
"""A round, counted from 0, or one for each place of a batch."""
Decisions = Mapping[str, Rounds]
"""By agent: 0 to reject, 1 to accept, 2 to go on."""


class Protocol(ABC):
    """Who is active when, when a decision counts, and what it pays.

    It knows nothing of what messages are. Rounds, seeds, decisions and labels are numbers, or
    tensors of one shape (*B,): a place of B for each of many interactions side by side. Names and
    rewards follow Hammond and Adam-Day 2025, "Neural Interactive Proofs".

    Args:
        max_message_rounds: rounds after which it is over, with or without a decision.
        min_message_rounds: rounds, with that of the decision, before which none counts.
        turn_reward: what a turn without a decision pays who is to decide.
        shared_reward: provers are paid what those are who decide: the mean, if there are several.
        random_stances: one seed in two turns around what all provers argue for.

    Raises:
        ConfigError: for less than one round, or more at least than at most; or if an agent that is
            to decide is none of the protocol's.
    """

    agent_names: Sequence[str]
    deciders: Sequence[str] = (VERIFIER,)
    """Agents that decide, each once. It is over when all have; () for a protocol without."""
    message_channel_names: Sequence[str] = ("main",)
    agent_channel_visibility: Sequence[tuple[str, str]]
    """Pairs of an agent and a channel that it sees."""
    rejecting: Sequence[str] = ()
    """Provers that argue for rejecting, and are paid for it; the others for accepting."""
    logits_read: Sequence[str] = ()
    """Agents on whose logits rewards hang, not only on what they say."""

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
                f"{type(self).__name__}.deciders names {strangers[0]!r}, and its agents are "
                f"{', '.join(self.agent_names)}; say who decides: deciders = (...), () for nobody"
            )
        rounds = torch.arange(max_message_rounds)
        for agent in self.deciders:
            if not bool(self.can_decide(rounds, agent=agent).any()):
                raise ConfigError(
                    f"{type(self).__name__}(max_message_rounds={max_message_rounds}, "
                    f"min_message_rounds={min_message_rounds}) leaves the {agent} no round to "
                    "decide in; raise the one, or lower the other"
                )

    # ---------------------------------------------------------------- the schedule

    @abstractmethod
    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        """Tell whether an agent speaks on a channel, (*B,); ``seed`` decides where chance does."""

    def speaks(self, agent: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        """Tell whether an agent is active on any channel, (*B,)."""
        told = [self.is_active(agent, c, round, seed) for c in self.visible(agent)]
        return reduce(or_, told) if told else torch.zeros_like(torch.as_tensor(round)) > 0

    def visible(self, agent: str) -> list[str]:
        """Channels that an agent sees."""
        return [channel for name, channel in self.agent_channel_visibility if name == agent]

    @property
    def prover_names(self) -> list[str]:
        """All agents but those that decide."""
        return [name for name in self.agent_names if name not in self.deciders]

    # ---------------------------------------------------------------- decisions

    def can_decide(self, round: Rounds, seed: Rounds = 0, agent: str | None = None) -> Tensor:
        """Tell whether a decision of an agent (None: the first of ``deciders``) counts, (*B,)."""
        own = self.has_turn(round, seed, agent)
        return own & (torch.as_tensor(round) >= self.min_message_rounds - 1)

    def has_turn(self, round: Rounds, seed: Rounds = 0, agent: str | None = None) -> Tensor:
        """Tell whether it is the turn of one that decides (None: of the first), (*B,)."""
        return self.speaks(self.deciders[0] if agent is None else agent, round, seed)

    def decided(
        self,
        decisions: Decisions,
        round: Rounds,
        seed: Rounds = 0,
        earlier: Decisions | None = None,
    ) -> dict[str, Tensor]:
        """What each of ``deciders`` has decided by the end of a round, (*B,); 2 where nothing.

        Args:
            decisions: that were made in the round; an agent decides once, what follows is nothing,
                as is one that is left out.
            round: that they were made in.
            seed: of the interaction.
            earlier: what this method said of the round before; None: nothing was decided.
        """
        found = {}
        for agent in self.deciders:
            now = torch.as_tensor(decisions.get(agent, GO_ON))
            counted = torch.where(self.can_decide(round, seed, agent), now, GO_ON)
            before = _of(agent, earlier)
            found[agent] = torch.where(before == GO_ON, counted, before)
        return found

    def verdict(self, decided: Decisions) -> Tensor:
        """What all decisions together come to, (*B,): that of more agents; 2 if there is none."""
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
        """Whether a round was the last, (*B,), and what it pays each agent, (*B,).

        It is the last when all of ``deciders`` have decided. Each is paid 1 for a right decision
        when it makes it, -1 for a wrong one, or for none by the last round; provers are paid in the
        last round, for the verdict.

        Args:
            decisions: by agent, 0 to reject, 1 to accept, 2 to go on; those of ``deciders`` count.
            round: that they were made in.
            label: 1 if accepting is right, else 0.
            seed: of the interaction.
            earlier: what :meth:`decided` said of the round before; None: nothing was decided.
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
        """What a round pays agents besides, (*B,), for logits; here: nothing.

        Args:
            logits: by agent, of all in ``logits_read``: of its message (*B, M) and its decision
                (*B, 3).
            round: that they were made in.
            seed: of the interaction.
            earlier: what :meth:`decided` said of the round before; None: nothing was decided.
        """
        return {}

    def prover_rewards(self, decided: Tensor, paid: Tensor, seed: Rounds = 0) -> dict[str, Tensor]:
        """What a round pays each prover, (*B,): 1 if the verdict is what it argues for.

        Args:
            decided: the verdict, in the round that ends it, else 2.
            paid: what the round pays those who decide, on average.
            seed: of the interaction.
        """
        if self.shared_reward:
            return dict.fromkeys(self.prover_names, paid)
        return {name: (decided == self.stance(name, seed)).float() for name in self.prover_names}

    def stance(self, prover: str, seed: Rounds = 0) -> Tensor:
        """The decision that a prover argues for, (*B,): 0 to reject, 1 to accept."""
        turned = drawn(seed, 2) if self.random_stances else torch.zeros_like(torch.as_tensor(seed))
        return (REJECT if prover in self.rejecting else ACCEPT) ^ turned


def _of(agent: str, earlier: Decisions | None) -> Tensor:
    """What an agent had decided before, (*B,)."""
    return torch.as_tensor((earlier or {}).get(agent, GO_ON))


def _all_decided(decided: Mapping[str, Tensor]) -> Tensor:
    """Whether nobody has yet to decide, (*B,); where nobody decides, no."""
    told = [decision != GO_ON for decision in decided.values()]
    return reduce(and_, told) if told else torch.tensor(False)
