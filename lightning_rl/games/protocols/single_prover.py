"""Nip, Adp and SoloVerifier: protocols with one prover, or none."""

from typing import Any

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
        options: further arguments of :class:`Protocol`.

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
        **options: Any,
    ) -> None:
        self.verifier_first = verifier_first
        super().__init__(max_message_rounds, min_message_rounds, **options)

    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        first = (agent == VERIFIER) == self.verifier_first
        return torch.as_tensor(round) % 2 == (0 if first else 1)


@configurable
class Adp(Nip):
    """The prover speaks once, then the verifier decides (Anil et al. 2021, prover-verifier games).

    Args:
        options: arguments of :class:`Protocol` except the numbers of rounds.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(2, 1, False, **options)


class SoloVerifier(Protocol):
    """The verifier decides alone, at once: the baseline that shows what a prover's messages add."""

    agent_names = (VERIFIER,)
    agent_channel_visibility = ((VERIFIER, "main"),)

    def __init__(self) -> None:
        super().__init__(1, 1)

    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        return torch.as_tensor(round) == 0
