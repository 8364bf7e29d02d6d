"""PooledGym: gymnasium environments in processes, each at its own pace, served by one model."""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.gym import Gym, space_of
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.gym_player import EnvAnswer, EnvSeat, close
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.processes import EnvProcesses
from lightning_rl.envs.watch import END_S, START_S
from lightning_rl.errors import ConfigError, require_at_least


@configurable
class PooledGym(Gym):
    """A slow gymnasium environment, given by name, that is stepped in several processes.

    The agents choose actions for waiting environments as soon as enough of them wait.

    Args:
        name: such as ``Humanoid-v5``.
        arguments: passed to ``gymnasium.make``.
        wrappers: wrappers of the environment, the innermost first.
        workers: number of processes; each steps its share of the environments.
        min_batch: number of environments that must wait before the agents are called.
        max_batch: maximum number served at once; None: all that wait.
        max_wait: seconds after which fewer than ``min_batch`` are served.
        force_sync: all environments take each step together; a resumed run is then bit-equal.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        wrappers: list[str | dict[str, Any]] | None = None,
        workers: int = 2,
        min_batch: int = 1,
        max_batch: int | None = None,
        max_wait: float = 0.01,
        force_sync: bool = False,
    ) -> None:
        super().__init__(name, arguments, wrappers)
        require_at_least(1, workers=workers, min_batch=min_batch, max_batch=max_batch)
        require_at_least(0, max_wait=max_wait)
        if max_batch is not None and max_batch < min_batch:
            raise ConfigError(
                f"max_batch={max_batch} must be >= min_batch={min_batch}; raise it, or remove it"
            )
        self.workers = workers
        self.min_batch = min_batch
        self.max_batch = max_batch
        self.max_wait = max_wait
        self.force_sync = force_sync


class PooledCollector(GymCollector):
    """Steps environments in processes; which are served together varies, unless ``force_sync``."""

    env: PooledGym
    processes: EnvProcesses | None = None
    """None before the start and after the end."""
    _since = 0.0
    """When the environment that has waited longest began to wait."""

    @property
    def exact(self) -> str:
        if self.env.force_sync:
            return ""
        return "which environments are served together depends on timing; set force_sync: true"

    @property
    def _running(self) -> EnvProcesses:
        assert self.processes is not None
        return self.processes

    def _seated(self, seed: int, places: range) -> Sequence[EnvSeat]:
        one = self.env.made()
        self.agents = {AGENT: space_of(one)}
        self.deadline.again(END_S)
        close(self.env.name, [one])
        self.deadline.again(START_S)
        count = min(self.env.workers, len(places))
        shares = [places[i::count] for i in range(count)]
        self.processes = EnvProcesses(self.env, shares, seed, self._limit)
        return [EnvSeat(seed, place) for place in places]

    def _ask(self, index: int, what: str, *arguments: Any) -> None:
        seat = self._seats[index]
        if what == "act":
            seat.actions.append(*arguments)
            self.deadline.again()
        else:
            seat.episode, seat.actions = arguments[0], list(*arguments[1:])
            self.deadline.again(START_S)  # its process may have to start first
        self._asked[index] = what, arguments
        self._since = time.monotonic()
        self._running.ask(seat.place, what, *arguments)

    def _answers(self, others_wait: bool) -> Iterator[tuple[int, EnvAnswer]]:
        """Yield answers that arrive before the waiting environments have waited long enough.

        Raises:
            EnvError: if an environment raised, its process died, or none answers in time.
        """
        seconds = self.deadline.left
        if others_wait and not self.env.force_sync:
            seconds = self._since + self.env.max_wait - time.monotonic()
        ready = list(self._running.answers(max(0.0, seconds)))
        if not ready and self.deadline.left <= 0:
            raise self.deadline.expired(self.where())
        if not others_wait:
            self._since = time.monotonic()
        for place, answer in ready:
            index = place - self._seats[0].place
            self._asked.pop(index, None)
            self.deadline.again()
            if isinstance(answer, BaseException):
                raise answer
            if answer.begin is not None:
                seat = self._seats[index]
                seat.episode, seat.actions = seat.episode + 1, []
            yield index, answer

    def _served(self, waiting: Collection[int]) -> list[int]:
        left = len(waiting) + len(self._asked)
        enough = len(waiting) >= (left if self.env.force_sync else min(self.env.min_batch, left))
        patient = self.env.force_sync or time.monotonic() - self._since < self.env.max_wait
        return sorted(waiting)[: self.env.max_batch] if enough or not patient else []

    def where(self) -> str:
        index = next(iter(self._asked), None)
        return "" if index is None else self._seats[index].where()

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()
            self.processes = None

    def abandon(self) -> None:
        if self.processes is not None:
            self.processes.kill()
            self.processes = None
