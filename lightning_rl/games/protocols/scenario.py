"""Scenario: the words of a protocol's interactions, as told to each agent."""

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
    """An agent's position in a round of an interaction.

    ``columns`` is the row of data that it is about, ``stance`` what the agent argues for (2 for a
    decider), ``channels`` are those that it speaks on. ``last``: this is the last round in which a
    decision of it counts. ``guess``: the agent is asked only for a decision.
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
        """True if the agent is a decider."""
        return self.stance == GO_ON


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer as read: by channel the text for other agents, and a decider's decision."""

    texts: Mapping[str, str]
    decision: int = GO_ON


@configurable
class Scenario(ABC):
    """The words of interactions about rows of data; the protocol determines who speaks when.

    One object serves many interactions and keeps no state of them.

    Args:
        retries: how often an agent is asked again if its answer cannot be read.
        forced_guess: ask a decider that made no decision in its last turn for just that.
        shuffle_channels: agents read the channels of a round in an order drawn by the seed.

    Raises:
        ConfigError: if ``retries`` is negative.
    """

    classes: Sequence[str] = ("reject", "accept")
    """Names of the classes of rows for which rejecting, and accepting, is right."""

    def __init__(
        self, retries: int = 0, forced_guess: bool = True, shuffle_channels: bool = False
    ) -> None:
        require_at_least(0, retries=retries)
        self.retries = retries
        self.forced_guess = forced_guess
        self.shuffle_channels = shuffle_channels

    def check(self, agents: Sequence[str]) -> None:
        """Check that there is a prompt for each agent; called before any is asked. Does nothing
        here.

        Raises:
            ConfigError: if there is no prompt for one of them.
        """

    @abstractmethod
    def label(self, columns: Mapping[str, Any]) -> int:
        """Return 1 if accepting is right for a row, else 0."""

    @abstractmethod
    def opening(self, seat: Seat) -> list[Message]:
        """Return what an agent is told before anything is said; it must not depend on the round."""

    def cue(self, seat: Seat) -> str:
        """Return what an agent reads last before it answers; empty for nothing."""
        return ""

    def heard(self, seat: Seat, speaker: str, channel: str, text: str) -> str:
        """Return what an agent reads of another's message; empty for nothing."""
        return f"{speaker}: {text}"

    @abstractmethod
    def read(self, seat: Seat, answer: str) -> Reading | None:
        """Return an answer as read; None if it cannot be read."""

    def deciding(self, answer: str, decision: int) -> str:
        """Return a decider's answer with this decision (0 or 1) in place of its own.

        Raises:
            ConfigError: if the scenario does not define how a decision is written.
        """
        raise ConfigError(
            f"{type(self).__name__} has no deciding(answer, decision), which defines how a "
            "decision is written; add the method, to teach the verifier right decisions"
        )
