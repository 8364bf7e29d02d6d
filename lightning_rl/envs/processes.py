"""EnvProcesses: processes that step gymnasium environments, and the messages to and from them."""

import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from lightning_rl.envs.collector import EnvError, raised
from lightning_rl.envs.gym import Gym
from lightning_rl.envs.gym_player import EnvAnswer, EnvSlot, close
from lightning_rl.envs.watch import END_S
from lightning_rl.errors import LightningRLError
from lightning_rl.run.processes.child import PythonChild, ending


@contextmanager
def without_main() -> Iterator[None]:
    """Keep processes that ``multiprocessing`` spawns meanwhile from importing the script.

    A script without ``if __name__ == "__main__"`` would run again in each of them. Pickle refuses
    objects defined in the script meanwhile, since no other process could find them.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


class HungUpError(Exception):
    """The process at the other end is gone."""


@dataclass(frozen=True)
class Failed:
    """The last message of a process: the error that it raised."""

    error: str


def send(line: Connection, message: Any) -> None:
    """Send a copy; shared memory would disappear with its process.

    Raises:
        HungUpError: if the other end is closed.
    """
    copied = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    try:
        line.send_bytes(copied)
    except OSError as error:
        raise HungUpError from error


def receive(line: Connection) -> Any:
    """Wait for the next message and return it.

    Raises:
        HungUpError: if the other end is closed.
    """
    try:
        copied = line.recv_bytes()
    except (EOFError, OSError) as error:
        raise HungUpError from error
    return pickle.loads(copied)


class EnvProcesses:
    """Processes that each step a share of the environments.

    Args:
        env: the environment to step.
        shares: indices of environments, by process.
        seed: seed of the run.
        limit: steps after which an episode is truncated; None: the environment's own limit.
    """

    def __init__(
        self, env: Gym, shares: Sequence[Sequence[int]], seed: int, limit: int | None
    ) -> None:
        self.name = env.name
        self.shares = shares
        with without_main():  # where processes do not find what it has
            message = pickle.dumps((env.plain, seed, limit))
        self._process_of = {place: index for index, share in enumerate(shares) for place in share}
        self.processes = [PythonChild(run) for _ in shares]
        self._lines = [process.connection for process in self.processes]
        for index, share in enumerate(shares):
            self._send(index, (self.name, share, message))

    def ask(self, place: int, what: str, *arguments: Any) -> None:
        """Call a method of an environment's :class:`EnvSlot` in its process.

        Raises:
            EnvError: if the process is gone.
        """
        self._send(self._process_of[place], (place, what, *arguments))

    def _send(self, index: int, message: Any) -> None:
        try:
            send(self._lines[index], message)
        except HungUpError as error:
            raise self._gone(index) from error

    def answers(self, seconds: float) -> Iterator[tuple[int, EnvAnswer | BaseException]]:
        """Yield the answers that arrive within ``seconds``, with their environment's index.

        An answer is what the method returned, or an error that names what the environment raised.

        Raises:
            EnvError: if a process has failed, or is gone.
        """
        for line in wait(self._lines, seconds):
            index = self._lines.index(line)  # type: ignore[arg-type]
            try:
                answer = receive(self._lines[index])
            except HungUpError as error:
                raise self._gone(index) from error
            if isinstance(answer, Failed):
                raise EnvError(answer.error)
            yield answer

    def _gone(self, index: int) -> EnvError:
        numbers = ", ".join(map(str, self.shares[index]))
        process = self.processes[index]
        process.ended_within(END_S)
        how = "hung up" if process.status is None else ending(process.status)
        why = ", perhaps for lack of memory" if process.status == -signal.SIGKILL else ""
        return EnvError(
            f"{self.name}: the process of environments {numbers} is gone: it {how}{why}; its "
            "output is above"
        )

    def close(self) -> None:
        """Ask all of them to end; kill those that do not, since they hang in a step."""
        for line in self._lines:
            try:
                send(line, None)
            except HungUpError:
                continue  # it is gone already
            finally:
                line.close()  # so that none waits to be heard
        until = time.monotonic() + END_S
        for process in self.processes:
            process.ended_within(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all of them at once."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.kill()
        self.processes, self._lines = [], []


def run(line: Connection) -> None:
    """Run a process from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the run, which saves and ends them
    name = ""
    try:
        name, share, told = receive(line)
        env, seed, limit = pickle.loads(told)
        slots = {place: EnvSlot(env.made(), seed, place, limit) for place in share}
        while (request := receive(line)) is not None:
            place, what, *arguments = request
            answer: Any
            try:
                answer = getattr(slots[place], what)(*arguments)
            except BaseException as error:  # whatever an environment raises
                answer = raised(name, slots[place].where(), error)
            send(line, (place, answer))
        close(name, (slot.env for slot in slots.values()))
    except HungUpError:
        return  # nobody is there to be answered
    except BaseException as error:  # whatever an environment raises when it is created
        known = isinstance(error, LightningRLError)
        what = str(error) if known else f"{name}: {type(error).__name__}: {error}"
        with suppress(HungUpError):
            send(line, Failed(what))
