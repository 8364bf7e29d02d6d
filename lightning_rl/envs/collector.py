"""EnvCollector: steps environments with agents, and hands out a batch of steps per iteration."""

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import singledispatch
from types import FrameType
from typing import Any, NoReturn

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.maker import EnvMaker
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.networks.agent import EnvAgent
from lightning_rl.networks.space import Space

Agents = Mapping[str, EnvAgent]


class EnvError(LightningRLError):
    """An environment raised, gave NaN, hung, or is not what it was; names which, and where."""


@dataclass(frozen=True)
class EnvEpisode:
    """A finished episode.

    Args:
        rewards: each agent's return, undiscounted; of a group the mean over its agents.
        length: steps.
        seed: that it was reset with; None: the environment was not seeded for it alone.
        terminated: it came to an end by itself, and was not cut at a time limit.
        pictures: (H, W, 3) bytes each, of every step, where it was rendered.
    """

    rewards: Mapping[str, float]
    length: int
    seed: int | None = None
    terminated: bool = True
    pictures: Sequence[Any] = ()

    @property
    def reward(self) -> float:
        """The mean over agents."""
        return sum(self.rewards.values()) / len(self.rewards)


class EnvCollector(ABC):
    """Steps a number of environments side by side.

    A batch is a TensorDict with ``steps`` [E, T] and ``ends`` [M]. ``steps`` has ``done`` and
    ``terminated`` (E, T), and per agent, under its name, ``observations`` by name, ``actions`` by
    name, ``logprobs`` (E, T, *A) and ``rewards`` (E, T, *A); with a memory ``state`` (E, T, *A, S)
    before each step and ``begins`` (E, T), where an episode begins. ``ends`` holds what followed
    steps that no step follows (the last, and those at which an episode was cut): their ``place``
    (M,), e * T + t, and per agent ``observations``. The data module adds to ``steps`` which of them
    are ``skipped`` (E, T), where its ``min_episode_length`` asks for it.
    """

    agents: Mapping[str, Space]
    """What each agent, or group of them, sees and does; known once it is started."""
    finished: Sequence[EnvEpisode] = ()
    """Episodes that came to their end in the last batch."""
    metrics: Mapping[str, float] = {}
    """What else is to be told of the last batch."""
    carried: Sequence[int] = ()
    """Steps that the episode at hand of each environment had when the last batch began; ():
    episodes begin with the batch."""

    syncing: Callable[[int], AbstractContextManager[Any]] = nullcontext
    """Entered with their version where agents are sent to other processes."""

    @property
    @abstractmethod
    def exact(self) -> str:
        """Why a run that goes on is not bit-equal to one that was never stopped; "": it is."""

    @abstractmethod
    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        """Make the environments; ``first`` is the place of the first among those of all ranks.

        ``num_envs`` None: as many as the environment has by itself, only to play in them.

        Raises:
            ConfigError: if they cannot be made.
        """

    @abstractmethod
    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        """The next ``steps`` steps of each environment.

        Raises:
            EnvError: naming the environment and its step.
        """

    @abstractmethod
    def play(
        self, agents: Agents, seeds: Sequence[int], greedy: bool, render: bool = False
    ) -> list[EnvEpisode]:
        """One episode for each seed, beside those that are being collected from.

        Args:
            agents: who acts.
            seeds: one per episode.
            greedy: take the best action, not a drawn one.
            render: keep pictures.

        Raises:
            EnvError: as ``collect``.
        """

    def state_dict(self) -> dict[str, Any]:
        """All that the next batch depends on besides the agents; primitives and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all environments."""


@singledispatch
def collector_of(
    env: EnvMaker, max_episode_length: int | None, max_step_seconds: float
) -> EnvCollector:
    """What steps an environment, unless a collector is chosen.

    For environments of another kind register their collector: ``collector_of.register(MyMaker,
    MyCollector)``.

    Raises:
        ConfigError: if there is none for it.
    """
    raise ConfigError(
        f"data.env: nothing steps a {type(env).__name__}; set data.collector, or register one with "
        "lightning_rl.envs.collector.collector_of"
    )


class Deadline:
    """Ends a step of an environment that takes too long: in the main thread, where signals are.

    Args:
        seconds: that one step may take.
        what: the environments, for the message.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        self._watches = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Watchdog is what watches then
            return
        before = signal.signal(signal.SIGALRM, self._expired)
        self._watches = True
        self.again()
        try:
            yield
        finally:
            self._watches = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def again(self) -> None:
        """Another step begins."""
        if self._watches:
            signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def _expired(self, number: int, frame: FrameType | None) -> NoReturn:
        self.expired()

    def expired(self) -> NoReturn:
        """Say that a step has taken too long.

        Raises:
            EnvError: always.
        """
        raise EnvError(
            f"{self.what}: a step took longer than max_step_seconds={self.seconds:g}; it hangs, or "
            "raise that"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's generators from a seed on; then they are as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        # torch.manual_seed would take longer than a step, and keep a traceback of every call for a
        # GPU that is not used yet.
        torch.default_generator.manual_seed(seed % 2**63)
        if devices:
            torch.cuda.manual_seed_all(seed % 2**63)
        yield


def require_finite_values(what: str, tensors: Mapping[str, Tensor], first: int = 0) -> None:
    """Refuse a batch (E, T, ...) with NaN or infinity in it; ``first`` is its first environment.

    Raises:
        EnvError: naming the first environment and step.
    """
    for name, values in tensors.items():
        if not values.is_floating_point():
            continue
        bad = ~values.isfinite()
        if bool(bad.any()):
            places = bad.reshape(*bad.shape[:2], -1).any(-1).nonzero()
            env, step = places[places[:, 1].argmin()].tolist()
            given = values[env, step].flatten().tolist()[:8]
            raise EnvError(
                f"{what}: environment {first + env} gave {given} as {name} at step {step} of the "
                "batch; mend it, or clip what it gives"
            )
