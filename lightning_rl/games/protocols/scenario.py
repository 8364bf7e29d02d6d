"""Scenario: what a protocol in words is about, told to each agent in its own way."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.games.protocols.base import GO_ON
from lightning_rl.rollout import Message


@dataclass(frozen=True, slots=True)
class Seat:
    """An agent's place in a round of an interaction.

    ``columns`` is the row of data that it is about, ``stance`` what the agent argues for (one that
    decides: 2), ``channels`` are those that it speaks on. ``last``: a decision counts, and none
    will in a later round. ``guess``: it is asked for nothing but a decision.
    """

    agent: str
    columns: Mapping[str, Any]
    stance: int
    round: int
    rounds: int
    channels: Sequence[str]
    last: bool = False
    guess: bool = False

    @property
    def decides(self) -> bool:
        """Whether the agent is one of those that decide."""
        return self.stance == GO_ON


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says: by channel what others may read; and a decision, of one that decides."""

    texts: Mapping[str, str]
    decision: int = GO_ON


@configurable
class Scenario(ABC):
    """The words of an interaction about rows of data; who speaks when is the protocol's.

    One object serves many interactions: it keeps nothing of any.

    Args:
        retries: how often an agent is asked again whose answer cannot be read.
        forced_guess: who has not decided in its last turn is asked for nothing else.
        shuffle_channels: the channels of a round are read in an order drawn by the seed.

    Raises:
        ConfigError: for a negative number.
    """

    classes: Sequence[str] = ("reject", "accept")
    """What rows are called of which rejecting, and accepting, is right."""

    def __init__(
        self, retries: int = 0, forced_guess: bool = True, shuffle_channels: bool = False
    ) -> None:
        require_at_least(0, retries=retries)
        self.retries = retries
        self.forced_guess = forced_guess
        self.shuffle_channels = shuffle_channels

    def check(self, agents: Sequence[str]) -> None:
        """Take note of who will be told something, before anybody is; here: nothing.

        Raises:
            ConfigError: if there is nothing to tell one of them.
        """

    @abstractmethod
    def label(self, columns: Mapping[str, Any]) -> int:
        """Whether accepting is right of a row: 1, else 0."""

    @abstractmethod
    def opening(self, seat: Seat) -> list[Message]:
        """What an agent is told before anything is said; it must not depend on the round."""

    def cue(self, seat: Seat) -> str:
        """What an agent reads last before it answers; empty: nothing."""
        return ""

    def heard(self, seat: Seat, speaker: str, channel: str, text: str) -> str:
        """What an agent reads of another's message; empty: nothing."""
        return f"{speaker}: {text}"

    @abstractmethod
    def read(self, seat: Seat, answer: str) -> Reading | None:
        """What an answer says; None if that cannot be read."""

    def deciding(self, answer: str, decision: int) -> str:
        """An answer of one that decides with this decision (0 or 1) in place of its own.

        Raises:
            ConfigError: if the scenario does not say how that is written.
        """
        raise ConfigError(
            f"{type(self).__name__} has no deciding(answer, decision), which says how a decision "
            "is written; add it to teach the verifier right ones"
        )
