"""EnvProcesses: processes that hold environments, and the messages to and from them."""

import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from lightning_rl.envs.collector import EnvError
from lightning_rl.envs.gym import space_of
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.gym_player import close
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.watch import END_S, START_S
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


class PipeEnd:
    """One end of a pipe between processes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the file descriptor, for ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Send a copy; shared memory would disappear with its process.

        Raises:
            HungUpError: if the other end is closed.
        """
        copied = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.send_bytes(copied)
        except OSError as error:
            raise HungUpError from error

    def receive(self) -> Any:
        """Wait for the next message and return it.

        Raises:
            HungUpError: if the other end is closed.
        """
        try:
            copied = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise HungUpError from error
        return pickle.loads(copied)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class EnvProcesses:
    """Processes that each hold a share of the environments and answer requests.

    Args:
        name: name of the environments, for messages.
        make: called in each process, as ``make(line, share, *arguments)``; returns what it holds. A
            request is the name of one of its methods, with arguments; what the method returns is
            the answer, unless it is None. In the end ``close`` is called.
        shares: indices of environments, by process.
        arguments: passed to ``make``.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        shares: Sequence[Sequence[int]],
        *arguments: Any,
    ) -> None:
        self.name = name
        self.shares = shares
        with without_main():  # where processes do not find what it has
            told = pickle.dumps((make, arguments))
        self.processes = [PythonChild(run) for _ in shares]
        self._lines = [PipeEnd(process.connection) for process in self.processes]
        for index, share in enumerate(shares):
            self.send(index, (name, share, told))

    def send(self, index: int, request: Any) -> None:
        """Send a request to a process.

        Raises:
            EnvError: if it is gone.
        """
        try:
            self._lines[index].send(request)
        except HungUpError as error:
            raise self._gone(index) from error

    def answers(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """Yield the answers that arrive within ``seconds``, with their process.

        Raises:
            EnvError: if a process has failed, or is gone.
        """
        for line in wait(self._lines, seconds):  # type: ignore[arg-type]
            index = self._lines.index(line)  # type: ignore[arg-type]
            try:
                answer = self._lines[index].receive()
            except HungUpError as error:
                raise self._gone(index) from error
            if isinstance(answer, Failed):
                raise EnvError(answer.error)
            yield index, answer

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
                line.send(None)
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


class ProcessesCollector(GymCollector):
    """Base class of collectors whose environments live in processes."""

    processes: EnvProcesses | None = None
    """None before the start and after the end."""

    @property
    def _running(self) -> EnvProcesses:
        assert self.processes is not None
        return self.processes

    def _start_processes(
        self,
        make: Callable[..., Any],
        shares: Sequence[Sequence[int]],
        seed: int,
        *arguments: Any,
    ) -> None:
        """Start :class:`EnvProcesses`, after reading the spaces of one environment."""
        one = self.env.made()
        self.agents = {AGENT: space_of(one)}
        self.deadline.again(END_S)
        close(self.env.name, [one])
        self.deadline.again(START_S)
        own = (self.env.plain, seed, self._limit, *arguments)
        self.processes = EnvProcesses(self.env.name, make, shares, *own)

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()
            self.processes = None

    def abandon(self) -> None:
        if self.processes is not None:
            self.processes.kill()
            self.processes = None


def run(connection: Connection) -> None:
    """Run a process from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the run, which saves and ends them
    line = PipeEnd(connection)
    name = ""
    try:
        name, share, told = line.receive()
        make, arguments = pickle.loads(told)
        held = make(line, share, *arguments)
        while (request := line.receive()) is not None:
            what, *arguments = request
            if (answer := getattr(held, what)(*arguments)) is not None:
                line.send(answer)
        held.close()
    except HungUpError:
        return  # nobody is there to be answered
    except BaseException as error:  # whatever an environment, or an agent, raises
        known = isinstance(error, LightningRLError)
        with suppress(HungUpError):
            line.send(Failed(str(error) if known else f"{name}: {type(error).__name__}: {error}"))
