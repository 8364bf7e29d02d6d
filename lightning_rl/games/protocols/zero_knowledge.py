"""ZeroKnowledge: a protocol in which provers are to give away nothing but what they prove."""

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
    """Another protocol, beside which the provers also talk to an adversarial verifier.

    The adversary speaks when the verifier does, on copies of the channels, and decides, too: that
    is no part of the verdict, but it is over only when both have decided. A simulator, who hears no
    prover, guesses what the adversary says: if it can, the provers have told the adversary nothing
    that could not be known without them (Hammond and Adam-Day 2025, "Neural Interactive Proofs",
    zero-knowledge protocols). Both are paid for their logits: they are TensorDict agents, taught
    with a :class:`SimulationLoss`, and none that are known by words.

    Args:
        protocol: the other one.
        simulator_coefficient: c, what a likeness of 1 pays the simulator and costs the adversary.
        prover_coefficient: c', what of that each prover is paid besides.

    Raises:
        ConfigError: for a coefficient that is not finite, or a protocol in which others decide
            than a verifier alone.
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
        self.agent_channel_visibility = (
            *protocol.agent_channel_visibility,
            *((_played_by(name), _COPY + c) for name, c in protocol.agent_channel_visibility),
        )
        if tuple(protocol.deciders) != (VERIFIER,):
            raise ConfigError(
                f"ZeroKnowledge(protocol={type(protocol).__name__}): who decides there is "
                f"{', '.join(protocol.deciders) or 'nobody'}, and an adversary plays the part of a "
                f"{VERIFIER} who decides alone; take such a protocol"
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
        """Those of the other protocol."""
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
        """The other protocol's."""
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
        """Whether verifier and adversary have both decided, and what the other protocol pays.

        That pays nothing once its verifier has decided; adversary and simulator are paid by
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
        """What a round pays besides, (*B,), where the adversary speaks: r, -r and c' r.

        r = c (cos(m, m') + cos(d, d')) with the logits m (*B, M) of messages and d (*B, 3) of
        decisions of the adversary, and the simulator's m' and d'. Who has decided speaks no more.
        """
        undecided = torch.as_tensor((earlier or {}).get(ADVERSARY, GO_ON)) == GO_ON
        spoke = self.speaks(ADVERSARY, round, seed) & undecided
        alike = likeness(logits[ADVERSARY], logits[SIMULATOR])
        paid = self.simulator_coefficient * alike * spoke
        provers = dict.fromkeys(self.prover_names, self.prover_coefficient * paid)
        return provers | {ADVERSARY: -paid, SIMULATOR: paid}


def likeness(logits: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The sum of the cosines of logits (*B, n) and others of the same choices, (*B,)."""
    pairs = zip(logits, others, strict=True)
    return torch.stack([cosine_similarity(a, b, dim=-1) for a, b in pairs]).sum(0)


def _played_by(agent: str) -> str:
    """Who plays an agent's part beside the copies of its channels."""
    return ADVERSARY if agent == VERIFIER else agent
