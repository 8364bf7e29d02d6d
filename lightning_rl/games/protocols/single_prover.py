"""Nip, Adp and SoloVerifier: protocols with one prover, or none."""

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.games.protocols.base import VERIFIER, Protocol, Rounds

PROVER = "prover"


@configurable
class Nip(Protocol):
    """A prover and a verifier speak in turns ("nip" of Hammond and Adam-Day 2025).

    Args:
        max_message_rounds: number of rounds, in each of which one of the two speaks.
        min_message_rounds: the first round, counted from 1, in which a decision counts.
        verifier_first: the verifier speaks in round 0, not the prover.
        turn_reward: the verifier's reward for a turn without a decision.
        shared_reward: the prover gets the verifier's reward.
        random_stances: for half of the seeds the prover argues for rejecting, and is
            paid for that.

    Raises:
        ConfigError: if the verifier has no round to decide in.
    """

    agent_names = (PROVER, VERIFIER)
    agent_channel_visibility = ((PROVER, "main"), (VERIFIER, "main"))

    def __init__(
        self,
        max_message_rounds: int = 8,
        min_message_rounds: int = 1,
        verifier_first: bool = False,
        turn_reward: float = 0.0,
        shared_reward: bool = False,
        random_stances: bool = False,
    ) -> None:
        self.verifier_first = verifier_first
        super().__init__(
            max_message_rounds, min_message_rounds, turn_reward, shared_reward, random_stances
        )

    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        first = (agent == VERIFIER) == self.verifier_first
        return torch.as_tensor(round) % 2 == (0 if first else 1)


@configurable
class Adp(Nip):
    """The prover speaks once, then the verifier decides (Anil et al. 2021, prover-verifier games).

    Args:
        turn_reward: the verifier's reward for a turn without a decision.
        shared_reward: the prover gets the verifier's reward.
        random_stances: for half of the seeds the prover argues for rejecting, and is
            paid for that.
    """

    def __init__(
        self, turn_reward: float = 0.0, shared_reward: bool = False, random_stances: bool = False
    ) -> None:
        super().__init__(2, 1, False, turn_reward, shared_reward, random_stances)


class SoloVerifier(Protocol):
    """The verifier decides alone, at once: the baseline that shows what a prover's messages add."""

    agent_names = (VERIFIER,)
    agent_channel_visibility = ((VERIFIER, "main"),)

    def __init__(self) -> None:
        super().__init__(1, 1)

    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        return torch.as_tensor(round) == 0
