"""Debate, MerlinArthur and Mnip: protocols with two provers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.games.protocols.base import VERIFIER, Protocol, Rounds, drawn

FIRST, SECOND = "prover0", "prover1"
_OWN_CHANNEL = {FIRST: "prover0_channel", SECOND: "prover1_channel"}
_CHANNELS = tuple(_OWN_CHANNEL.values())


@configurable
class Debate(Protocol):
    """Two provers argue against each other ("debate" of Hammond and Adam-Day 2025).

    The first is paid when the verifier rejects, the second when it accepts. Each writes on its own
    channel, the verifier on both, and all agents read all channels.

    Args:
        max_message_rounds: number of rounds, counting the turns of all agents.
        min_message_rounds: the first round, counted from 1, in which a decision counts.
        sequential: the first prover, the second and the verifier speak one after another; else both
            provers speak at once, without having read each other's message of the round.
        options: further arguments of :class:`Protocol`.

    Raises:
        ConfigError: if the verifier has no round to decide in.
    """

    agent_names = (FIRST, SECOND, VERIFIER)
    message_channel_names = _CHANNELS
    agent_channel_visibility = tuple((a, c) for a in (FIRST, SECOND, VERIFIER) for c in _CHANNELS)
    rejecting: Sequence[str] = (FIRST,)

    def __init__(
        self,
        max_message_rounds: int = 6,
        min_message_rounds: int = 1,
        sequential: bool = False,
        **options: Any,
    ) -> None:
        self.sequential = sequential
        super().__init__(max_message_rounds, min_message_rounds, **options)

    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        order = (
            [[FIRST], [SECOND], [VERIFIER]] if self.sequential else [[FIRST, SECOND], [VERIFIER]]
        )
        place = next(number for number, together in enumerate(order) if agent in together)
        own = channel == _OWN_CHANNEL.get(agent, channel)
        return (torch.as_tensor(round) % len(order) == place) & own


class Mnip(Debate):
    """Two provers, neither of whom reads the other ("mnip" of Hammond and Adam-Day 2025).

    Both are paid when the verifier accepts; what protects it is that they cannot coordinate their
    messages. The verifier reads and writes both channels. Its arguments are those of ``Debate``.

    Raises:
        ConfigError: if the verifier has no round to decide in.
    """

    agent_channel_visibility = (*_OWN_CHANNEL.items(), *((VERIFIER, c) for c in _CHANNELS))
    rejecting = ()


@configurable
class MerlinArthur(Protocol):
    """One of two provers, drawn by the seed, speaks once; the verifier decides (Waldchen 2022).

    The first is paid when the verifier rejects, the second when it accepts; the verifier has to
    tell from the message alone which of them wrote it. See "Formal Interpretability with
    Merlin-Arthur Classifiers".

    Args:
        options: arguments of :class:`Protocol` except the numbers of rounds.
    """

    agent_names = (FIRST, SECOND, VERIFIER)
    agent_channel_visibility = tuple((name, "main") for name in (FIRST, SECOND, VERIFIER))
    rejecting: Sequence[str] = (FIRST,)

    def __init__(self, **options: Any) -> None:
        super().__init__(2, 1, **options)

    def is_active(self, agent: str, channel: str, round: Rounds, seed: Rounds = 0) -> Tensor:
        now = torch.as_tensor(round)
        if agent == VERIFIER:
            return now == 1
        return (now == 0) & (drawn(seed, 2) == (FIRST, SECOND).index(agent))
