"""Protocol: the schedule of an interaction with a verifier, its decisions and its rewards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.protocols.chance import drawn

REJECT = 0
"""The verifier's decision that it is not so."""
ACCEPT = 1
"""The verifier's decision that it is so."""
GO_ON = 2
"""What the verifier says that has not decided yet."""
VERIFIER = "verifier"
"""The name of the agent that decides, in every protocol."""

Rounds = Tensor | int
"""A round, counted from 0, or one for each place of a batch."""


class Protocol(ABC):
    """Who is active when, when a decision counts, and what it pays.

    It knows nothing of what messages are. Rounds, seeds, decisions and labels are numbers, or
    tensors of one shape (*B,): a place of B for each of many interactions side by side. Names and
    rewards follow Hammond and Adam-Day 2025, "Neural Interactive Proofs".

    Args:
        max_message_rounds: rounds after which it is over, with or without a decision.
        min_message_rounds: rounds, with that of the decision, before which none counts.
        turn_reward: what a turn without a decision pays the verifier.
        shared_reward: provers are paid what the verifier is.
        random_stances: one seed in two turns around what all provers argue for.

    Raises:
        ConfigError: for less than one round, or more at least than at most.
    """

    agent_names: Sequence[str]
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
        rounds = torch.arange(max_message_rounds)
        if not bool(self.can_decide(rounds).any()):
            raise ConfigError(
                f"{type(self).__name__}(max_message_rounds={max_message_rounds}, "
                f"min_message_rounds={min_message_rounds}) leaves the verifier no round to decide "
                "in; raise the one, or lower the other"
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
        """All agents but the verifier."""
        return [name for name in self.agent_names if name != VERIFIER]

    # ---------------------------------------------------------------- decisions

    def can_decide(self, round: Rounds, seed: Rounds = 0) -> Tensor:
        """Tell whether a decision of the verifier would count, (*B,)."""
        return self.has_turn(round, seed) & (torch.as_tensor(round) >= self.min_message_rounds - 1)

    def has_turn(self, round: Rounds, seed: Rounds = 0) -> Tensor:
        """Tell whether it is the verifier's turn, (*B,)."""
        return self.speaks(VERIFIER, round, seed)

    def step(
        self, decisions: Mapping[str, Rounds], round: Rounds, label: Rounds, seed: Rounds = 0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Whether a round was the last, (*B,), and what it pays each agent, (*B,).

        Verifier: 1 if its decision is right, -1 if it is wrong or has not come by the last round.

        Args:
            decisions: by agent, 0 to reject, 1 to accept, 2 to go on; the verifier's is read.
            round: that they were made in.
            label: 1 if accepting is right, else 0.
            seed: of the interaction.
        """
        decision, now, right = map(torch.as_tensor, (decisions[VERIFIER], round, label))
        counts = self.can_decide(now, seed) & (decision != GO_ON)
        decided = torch.where(counts, decision, GO_ON)
        last = now >= self.max_message_rounds - 1
        verdict = torch.where(decision == right, 1.0, -1.0)
        turn = self.turn_reward * self.has_turn(now, seed)
        paid = torch.where(counts, verdict, torch.where(last, -1.0, turn))
        return counts | last, {VERIFIER: paid} | self.prover_rewards(decided, paid, seed)

    def logit_rewards(
        self, logits: Mapping[str, Sequence[Tensor]], round: Rounds, seed: Rounds = 0
    ) -> dict[str, Tensor]:
        """What a round pays agents besides, (*B,), for logits; here: nothing.

        Args:
            logits: by agent, of all in ``logits_read``: of its message (*B, M) and its decision
                (*B, 3).
            round: that they were made in.
            seed: of the interaction.
        """
        return {}

    def prover_rewards(self, decided: Tensor, paid: Tensor, seed: Rounds = 0) -> dict[str, Tensor]:
        """What a round pays each prover, (*B,): 1 if the decision is what it argues for.

        Args:
            decided: the verifier's decision, 2 where none counts.
            paid: what it pays the verifier.
            seed: of the interaction.
        """
        if self.shared_reward:
            return dict.fromkeys(self.prover_names, paid)
        return {name: (decided == self.stance(name, seed)).float() for name in self.prover_names}

    def stance(self, prover: str, seed: Rounds = 0) -> Tensor:
        """The decision that a prover argues for, (*B,): 0 to reject, 1 to accept."""
        turned = drawn(seed, 2) if self.random_stances else torch.zeros_like(torch.as_tensor(seed))
        return (REJECT if prover in self.rejecting else ACCEPT) ^ turned
