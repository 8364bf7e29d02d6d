"""EnvCollector: steps environments with agents, and hands out a batch of steps per iteration."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.maker import EnvMaker
from lightning_rl.envs.networks.agent import EnvAgent
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.run.exits import EndsProcess
from lightning_rl.run.loop import note_progress

Agents = Mapping[str, EnvAgent]


class EnvError(LightningRLError):
    """An environment raised, gave NaN, hung, or is not what it was; names which, and where."""


class BrokenOff(BaseException):
    """Ends a collection that nobody waits for; no Exception, as environments catch those."""


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
    steps that no step of their episode follows (the last, and those at which an episode came to its
    end or was cut): their ``place`` (M,), e * T + t, and per agent ``observations``. The data
    module adds to ``steps`` which of them are ``skipped`` (E, T), where its ``min_episode_length``
    asks for it, and hands all of it out as :mod:`.batches` says.
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
    greedy = False
    """Collect with the mode of the agents' distributions, in place of what is drawn from them."""
    deadline: "Deadline | None" = None
    """By when the present step has to be over; None: nobody watches for steps that hang."""

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

    def where(self) -> str:
        """Which environment is being stepped, and where it is, as far as that is known."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Let go of all environments."""

    def abandon(self) -> None:
        """Touch no environment any more, as one of them hangs; end what processes they have."""


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
    """By when the present step of the environments has to be over.

    Whoever steps says so with ``again`` before each step; who waits looks at ``left``.

    Args:
        seconds: that one step may take.
        what: the environments, for the message.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        self._end = float("inf")
        self._given = seconds
        self._broken_off = False

    def begin(self, seconds: float | None = None) -> None:
        """A call begins, whose first step may take so long; None: as long as any."""
        self._broken_off = False
        self.again(seconds)

    def again(self, seconds: float | None = None) -> None:
        """Another step begins.

        Raises:
            BrokenOff: if nobody waits for it.
        """
        if self._broken_off:
            raise BrokenOff
        self._given = self.seconds if seconds is None else seconds
        self._end = time.monotonic() + self._given
        note_progress()

    def break_off(self) -> None:
        """Let the step at hand be the last one."""
        self._broken_off = True

    @property
    def left(self) -> float:
        """Seconds that the present step has."""
        return self._end - time.monotonic()

    def expired(self, where: str = "") -> EnvError:
        """What to say of a step that has taken too long; ``where``: which, and where it hangs."""
        which = f" ({where})" if where else ""
        if self._given != self.seconds:  # it is no step
            return EnvError(f"{self.what}: it did not come to its end in {self._given:g} s{which}")
        return EnvError(
            f"{self.what}: a step took longer than max_step_seconds={self.seconds:g}; it hangs, or "
            f"raise that{which}"
        )


def raised(what: str, where: str, error: BaseException) -> BaseException:
    """What to raise where an environment raised ``error``.

    Args:
        what: the environments.
        where: which of them, and where it is.
    """
    main = threading.current_thread() is threading.main_thread()
    if isinstance(error, BrokenOff) or (main and isinstance(error, KeyboardInterrupt)):
        return error  # the user's own
    place = f" ({where})" if where and where not in str(error) else ""
    if isinstance(error, EnvError):
        told = str(error)
        return EnvError(told + place if told.startswith(what) else f"{what}: {told}{place}")
    if isinstance(error, LightningRLError):
        return error
    which = f"{where} " if where else "it "
    if isinstance(error, EndsProcess):
        return EnvError(f"{what}: {which}called {error}, which would have ended the run")
    advice = ""
    if isinstance(error, ValueError) and "main thread" in str(error):  # of signal.signal
        advice = "; PooledGym steps it in the main thread of a process of its own"
    return EnvError(f"{what}: {which}raised {type(error).__name__}: {error}{advice}")


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
