"""ZeroKnowledge: a protocol in which provers should reveal nothing but what they prove."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite
from lightning_rl.games.protocols.base import GO_ON, VERIFIER, Decisions, Protocol, Rounds

ADVERSARY, SIMULATOR = "adversarial_verifier", "simulator"
_COPY = "adversarial_"


@configurable
class ZeroKnowledge(Protocol):
    """Wraps another protocol, beside which the provers also talk to an adversarial verifier.

    The adversary speaks when the verifier does, on copies of the channels, and decides, too. Its
    decision is not part of the verdict, but the interaction ends only when both have decided. A
    simulator, which reads no prover, predicts what the adversary says: if it can, the provers have
    told the adversary nothing that it could not know without them (Hammond and Adam-Day 2025,
    "Neural Interactive Proofs", zero-knowledge protocols). Both are paid by their logits, so they
    must be TensorDict agents, trained with a :class:`SimulationLoss`, and cannot speak in words.

    Args:
        protocol: the wrapped protocol.
        simulator_coefficient: c, what a similarity of 1 pays the simulator and costs the adversary.
        prover_coefficient: c', the share of the simulator's reward that each prover gets as well.

    Raises:
        ConfigError: if a coefficient is not finite, or if the protocol's only decider is not the
            verifier.
    """

    logits_read = (ADVERSARY, SIMULATOR)

    def __init__(
        self,
        protocol: Protocol,
        simulator_coefficient: float = 1.0,
        prover_coefficient: float = 1.0,
    ) -> None:
        require_finite(
            simulator_coefficient=simulator_coefficient, prover_coefficient=prover_coefficient
        )
        self.protocol = protocol
        self.simulator_coefficient = simulator_coefficient
        self.prover_coefficient = prover_coefficient
        self.agent_names = (*protocol.agent_names, ADVERSARY, SIMULATOR)
        self.deciders = (*protocol.deciders, ADVERSARY)
        copies = tuple(_COPY + channel for channel in protocol.message_channel_names)
        self.message_channel_names = (*protocol.message_channel_names, *copies)
        seen = protocol.agent_channel_visibility
        apart = ((ADVERSARY if name == VERIFIER else name, _COPY + c) for name, c in seen)
        self.agent_channel_visibility = (*seen, *apart)
        if tuple(protocol.deciders) != (VERIFIER,):
            raise ConfigError(
                f"ZeroKnowledge(protocol={type(protocol).__name__}) is decided by "
                f"{', '.join(protocol.deciders) or 'nobody'}, but the adversary copies a "
                f"{VERIFIER} that decides alone; use a protocol with such a verifier"
            )
        super().__init__(
            protocol.max_message_rounds,
            protocol.min_message_rounds,
            protocol.turn_reward,
            protocol.shared_reward,
            protocol.random_stances,
        )

    @property
    def prover_names(self) -> list[str]:
        """The wrapped protocol's provers."""
        return self.protocol.prover_names

    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        if channel not in self.visible(agent):
            return torch.zeros_like(torch.as_tensor(round)) > 0
        played = VERIFIER if agent == ADVERSARY else agent
        return self.protocol.is_active(played, channel.removeprefix(_COPY), round, seed)

    def speaks(self, agent: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        """Tell whether an agent is active, (*B,); the simulator is when the adversary is."""
        return super().speaks(ADVERSARY if agent == SIMULATOR else agent, round, seed)

    def has_turn(self, round: Rounds, seed: Rounds = 0, agent: str | None = None) -> Tensor:
        return self.protocol.has_turn(round, seed, VERIFIER)  # whom the adversary plays

    def can_decide(self, round: Rounds, seed: Rounds = 0, agent: str | None = None) -> Tensor:
        return self.protocol.can_decide(round, seed, VERIFIER)

    def verdict(self, decided: Decisions) -> Tensor:
        """Return the wrapped protocol's verdict, (*B,)."""
        return self.protocol.verdict(decided)

    def stance(self, prover: str, seed: Rounds = 0) -> Tensor:
        return self.protocol.stance(prover, seed)

    def step(
        self,
        decisions: Decisions,
        round: Rounds,
        label: Rounds,
        seed: Rounds = 0,
        earlier: Decisions | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return whether verifier and adversary have both decided, and the wrapped protocol's
        rewards.

        Those are zero once its verifier has decided; adversary and simulator are paid by
        :meth:`logit_rewards`.
        """
        over, rewards = self.protocol.step(decisions, round, label, seed, earlier)
        both = self.decided(decisions, round, seed, earlier)[ADVERSARY] != GO_ON
        last = torch.as_tensor(round) >= self.max_message_rounds - 1
        nothing = torch.zeros_like(rewards[VERIFIER])
        return last | (over & both), rewards | {ADVERSARY: nothing, SIMULATOR: nothing}

    def logit_rewards(
        self,
        logits: Mapping[str, Sequence[Tensor]],
        round: Rounds,
        seed: Rounds = 0,
        earlier: Decisions | None = None,
    ) -> dict[str, Tensor]:
        """Return rewards for rounds in which the adversary speaks, (*B,): r, -r and c' r.

        r = c (cos(m, m') + cos(d, d')) is the simulator's, -r the adversary's and c' r each
        prover's. The logits m (*B, M) of messages and d (*B, 3) of decisions are the adversary's,
        m' and d' the simulator's. An agent that has decided no longer speaks.
        """
        undecided = torch.as_tensor((earlier or {}).get(ADVERSARY, GO_ON)) == GO_ON
        spoke = self.speaks(ADVERSARY, round, seed) & undecided
        alike = likeness(logits[ADVERSARY], logits[SIMULATOR])
        paid = self.simulator_coefficient * alike * spoke
        provers = dict.fromkeys(self.prover_names, self.prover_coefficient * paid)
        return provers | {ADVERSARY: -paid, SIMULATOR: paid}


def likeness(logits: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the sum of the cosines between pairs of logits (*B, n), (*B,)."""
    pairs = zip(logits, others, strict=True)
    return torch.stack([cosine_similarity(a, b, dim=-1) for a, b in pairs]).sum(0)
