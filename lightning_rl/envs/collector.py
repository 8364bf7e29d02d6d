"""EnvCollector: steps environments with agents and returns a batch of steps per iteration."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.networks.agent import EnvAgent
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import LightningRLError
from lightning_rl.run.loop.background import note_progress
from lightning_rl.run.processes.exits import EndsProcess

Agents = Mapping[str, EnvAgent]


class EnvError(LightningRLError):
    """An environment raised, returned NaN, hung or changed; names which one, and where."""


class BrokenOff(BaseException):
    """Ends a collection that nobody waits for; no Exception, since environments catch those."""


@dataclass(frozen=True)
class EnvEpisode:
    """A finished episode.

    Args:
        rewards: each agent's undiscounted return; for a group, the mean over its agents.
        length: number of steps.
        seed: the seed of its reset; None if the environment was not seeded for this episode.
        terminated: True if it ended by itself, not at a time limit.
        pictures: one per step, (H, W, 3) bytes each, if it was rendered.
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
    """Steps several environments side by side.

    A batch is a TensorDict with ``steps`` [E, T] and ``ends`` [M]. ``steps`` has ``done`` and
    ``terminated`` (E, T), and per agent, under its name, ``observations`` by name, ``actions`` by
    name, ``logprobs`` (E, T, *A) and ``rewards`` (E, T, *A); with a memory also ``state`` (E, T,
    *A, S) before each step and ``begins`` (E, T), True where an episode begins. ``ends`` holds the
    observations after steps whose episode has no later step in the batch (the last steps, and those
    at which an episode ended or was cut): their ``place`` (M,), e * T + t, and per agent
    ``observations``. The data module adds ``skipped`` (E, T) to ``steps`` if its
    ``min_episode_length`` requires it, and returns all of it in the form that :mod:`.batches`
    describes.
    """

    agents: Mapping[str, Space]
    """Observations and actions of each agent or group of agents; known after ``start``."""
    finished: Sequence[EnvEpisode] = ()
    """Episodes that ended in the last batch."""
    carried: Sequence[int] = ()
    """Steps that each environment's current episode already had when the last batch began; ():
    episodes begin with the batch.
    """
    greedy = False
    """Act with the mode of the agents' distributions instead of sampling from them."""
    deadline: "Deadline | None" = None
    """When the present step must be over; None: steps are not watched for hanging."""

    @property
    @abstractmethod
    def exact(self) -> str:
        """Why a resumed run is not bit-equal to an uninterrupted one; "" if it is."""

    @abstractmethod
    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        """Create the environments; ``first`` is the index of the first one among those of all
        ranks.

        ``num_envs`` None: as many as the environment has by itself, only to play in them.

        Raises:
            ConfigError: if they cannot be created.
        """

    @abstractmethod
    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        """Return the next ``steps`` steps of each environment.

        Raises:
            EnvError: names the environment and its step.
        """

    @abstractmethod
    def play(
        self, agents: Agents, seeds: Sequence[int], greedy: bool, render: bool = False
    ) -> list[EnvEpisode]:
        """Play one episode per seed, apart from the environments that batches are collected from.

        Args:
            agents: the agents that act.
            seeds: one per episode.
            greedy: take the best action instead of sampling.
            render: keep pictures.

        Raises:
            EnvError: as ``collect`` does.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next batch depends on besides the agents; primitives and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""

    def where(self) -> str:
        """Describe which environment is being stepped, and where it is, as far as known."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Close all environments."""

    def abandon(self) -> None:
        """Stop touching the environments because one hangs; end their processes."""


class Deadline:
    """The time by which the environments' present step must be over.

    The stepping thread calls ``again`` before each step; the waiting thread reads ``left``.

    Args:
        seconds: time limit of one step.
        what: name of the environments, for messages.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        self._end = float("inf")
        self._given = seconds
        self._broken_off = False

    def begin(self, seconds: float | None = None) -> None:
        """Begin a call, whose first step may take ``seconds``; None: as long as any step."""
        self._broken_off = False
        self.again(seconds)

    def again(self, seconds: float | None = None) -> None:
        """Begin another step.

        Raises:
            BrokenOff: if nobody waits for it.
        """
        if self._broken_off:
            raise BrokenOff
        self._given = self.seconds if seconds is None else seconds
        self._end = time.monotonic() + self._given
        note_progress()

    def break_off(self) -> None:
        """Make the current step the last one."""
        self._broken_off = True

    @property
    def left(self) -> float:
        """Seconds left for the present step."""
        return self._end - time.monotonic()

    def expired(self, where: str = "") -> EnvError:
        """Return the error for a step that took too long; ``where``: which one, and its place."""
        which = f" ({where})" if where else ""
        if self._given != self.seconds:  # it is no step
            return EnvError(f"{self.what}: it did not finish within {self._given:g} s{which}")
        return EnvError(
            f"{self.what}: a step took longer than max_step_seconds={self.seconds:g}; the "
            f"environment may hang; otherwise raise max_step_seconds{which}"
        )


def raised(what: str, where: str, error: BaseException) -> BaseException:
    """Return the exception to raise after an environment raised ``error``.

    Args:
        what: name of the environments.
        where: which of them, and where it is.
    """
    main = threading.current_thread() is threading.main_thread()
    if isinstance(error, BrokenOff) or (main and isinstance(error, KeyboardInterrupt)):
        return error  # the user's own
    location = f" ({where})" if where and where not in str(error) else ""
    if isinstance(error, EnvError):
        message = str(error)
        return EnvError(
            message + location if message.startswith(what) else f"{what}: {message}{location}"
        )
    if isinstance(error, LightningRLError):
        return error
    which = f"{where} " if where else "it "
    if isinstance(error, EndsProcess):
        return EnvError(f"{what}: {which}called {error}, which would end the run")
    advice = ""
    if isinstance(error, ValueError) and "main thread" in str(error):  # of signal.signal
        advice = "; PooledGym steps it in the main thread of a process of its own"
    return EnvError(f"{what}: {which}raised {type(error).__name__}: {error}{advice}")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's generators with a seed, then restore their state."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        # torch.manual_seed would take longer than a step, and keep a traceback of every call for a
        # GPU that is not used yet.
        torch.default_generator.manual_seed(seed % 2**63)
        if devices:
            torch.cuda.manual_seed_all(seed % 2**63)
        yield


def require_finite_values(what: str, tensors: Mapping[str, Tensor], first: int = 0) -> None:
    """Refuse a batch (E, T, ...) that contains NaN or infinity; ``first`` is its first environment.

    Raises:
        EnvError: names the first such environment and step.
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
                "batch; fix the environment, or clip its values"
            )
