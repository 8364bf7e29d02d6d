"""Runs programs: many at once, each with limits, and no longer than needed."""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rl.errors import ConfigError
from lightning_rl.run.processes.child import ending, last_lines
from lightning_rl.run.processes.machine import ALLOW_SANDBOX
from lightning_rl.serving.results import Ending

_log = logging.getLogger(__name__)
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_END_S = 10.0
"""Seconds to wait for a program told to end; only one stuck in the kernel takes longer."""
_DRAIN_S = 1.0
"""Seconds to read output after a program's end; only a leaked descriptor takes longer."""
_KEPT_STDERR = 4096
_REASON_LINES = 3


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """A program to run, and its limits.

    Args:
        env: all environment variables.
        command: program and arguments; empty for a script.
        script: a Python file, which the launcher's own Python runs.
        arguments: the script's arguments.
        cwd: working directory.
        memory_bytes: address space of each of its processes; None: no limit.
    """

    env: Mapping[str, str]
    command: Sequence[str] = ()
    script: str = ""
    arguments: Sequence[str] = ()
    cwd: str = "."
    memory_bytes: int | None = None


class Launcher:
    """The process that starts programs; it starts with the first one, and ends with this process.

    Args:
        modules: modules that Python scripts need, imported once for all of them.
        python: the interpreter that runs scripts; None: commands only.
        env: its environment variables.
        own_processes: whether each program sees only its own processes, if this machine allows
            that; otherwise it can read others' keys in ``/proc``.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        own_processes: bool = True,
    ) -> None:
        # Commands need nothing of an environment, without which it starts sooner.
        own = [sys.executable, "-I", "-S"]
        self._command = [*(own if python is None else [python]), _LAUNCHER]
        self._modules = list(modules)
        self._env = dict(env or {})
        self._own_processes = own_processes
        self._warned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    @asynccontextmanager
    async def running(
        self, request: ProgramRequest, stdin: bytes, max_output_bytes: int
    ) -> "AsyncIterator[Program]":
        """Start a program, and end it at the end of the block.

        Raises:
            ConfigError: if a module cannot be imported.
        """
        program = Program(max_output_bytes)
        try:
            await self._start(program, request, stdin)
            yield program
        finally:
            await program.end()

    def close(self) -> None:
        """End the launcher; programs that still run end when their blocks do."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    async def _start(self, program: "Program", request: ProgramRequest, stdin: bytes) -> None:
        with ExitStack() as theirs:

            def passed(file: int) -> int:
                theirs.callback(os.close, file)
                return file

            wanted = passed(_file_of(json.dumps(asdict(request)).encode()))
            given = passed(_file_of(stdin))
            out, err, control = map(passed, await program.open())
            await self._send([wanted, given, out, err, control])
        alone = await program.begun()
        if self._own_processes and not alone and not self._warned:
            self._warned = True
            _log.warning(
                "this machine does not allow separate process namespaces, so each program can read "
                "the others' keys in /proc: %s, or run only programs that you trust",
                ALLOW_SANDBOX,
            )

    async def _send(self, files: list[int]) -> None:
        for _ in range(2):
            channel = self._open()
            try:
                await _send_files(channel, files)
                return
            except (BrokenPipeError, ConnectionResetError):  # somebody killed it
                self.close()
        raise ConfigError(f"the launcher of programs, {self._command[0]!r}, ends when it starts")

    def _open(self) -> socket.socket:
        if self._channel is None:
            self._channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            alone = "alone" if self._own_processes else "together"
            with far:
                self._process = subprocess.Popen(
                    [*self._command, str(far.fileno()), alone, *self._modules],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=self._env,
                    pass_fds=[far.fileno()],
                    start_new_session=True,  # or Ctrl-C in a terminal would reach it too
                )
            self._channel.setblocking(False)
        return self._channel


class Program:
    """A started program, with its output and its keeper."""

    def __init__(self, max_output_bytes: int) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()  # the end of it
        self._max_output = max_output_bytes
        self._printed = 0
        self._pipes: list[_Pipe] = []
        self._keeper: socket.socket | None = None
        self._keepers_end: int | None = None  # by which it can be killed
        self._answer: asyncio.Task[dict[str, Any] | None] | None = None

    async def open(self) -> tuple[int, int, int]:
        """Return the program's ends of standard output, standard error and the keeper's socket."""
        loop = asyncio.get_running_loop()
        ends = []
        for take in (self._take_out, self._take_err):
            reader, writer = os.pipe()
            ends.append(writer)
            file = os.fdopen(reader, "rb", buffering=0)
            _, pipe = await loop.connect_read_pipe(partial(_Pipe, take), file)
            self._pipes.append(pipe)
        self._keeper, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._keeper.setblocking(False)
        return ends[0], ends[1], far.detach()

    async def begun(self) -> bool:
        """Wait until the program has started; the launcher may have to import modules first.

        Return whether it sees only its own processes.
        """
        assert self._keeper is not None
        first = await self._receive()
        if first is not None and "refused" in first:
            raise ConfigError(first["refused"])
        if first is not None:
            with suppress(ProcessLookupError):  # it has ended already
                self._keepers_end = os.pidfd_open(first["keeper"])
        self._answer = asyncio.create_task(self._receive())
        return first is not None and "alone" in first

    async def wait(self) -> Ending:
        """Wait for the program and everything it started; return its ending with all output read.

        The ending is ``done``, or ``exit``, ``killed`` or ``output`` with the reason.
        """
        assert self._answer is not None
        answer = await asyncio.shield(self._answer)
        await asyncio.wait([pipe.closed for pipe in self._pipes], timeout=_DRAIN_S)
        if self._printed > self._max_output:
            limit = f"max_output_bytes={self._max_output}"
            return Ending("output", f"wrote more than {limit} to its output")
        if answer is None:
            return Ending("killed", "its keeper was killed")
        if answer["error"]:
            return Ending("exit", f"could not be started: {answer['error']}")
        if (status := os.waitstatus_to_exitcode(answer["status"])) == 0:
            return Ending("done")
        printed = last_lines(self.stderr, _REASON_LINES)
        return Ending("killed" if status < 0 else "exit", f"{ending(status)}{printed}")

    async def end(self) -> None:
        """End the program and everything it started, unless it has ended."""
        self._ask_to_end()
        if self._answer is not None:
            _, late = await asyncio.wait([self._answer], timeout=_END_S)
            if late and self._keepers_end is not None:  # something has stopped it
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._keepers_end, signal.SIGKILL)
            self._answer.cancel()
        if self._keepers_end is not None:
            os.close(self._keepers_end)
            self._keepers_end = None
        if self._keeper is not None:
            self._keeper.close()
        for pipe in self._pipes:
            pipe.close()

    def _ask_to_end(self) -> None:
        if self._keeper is not None:
            with suppress(OSError):  # it has gone already
                self._keeper.send(b".")

    async def _receive(self) -> dict[str, Any] | None:
        """Return the keeper's next message; None if the keeper is gone."""
        assert self._keeper is not None
        try:
            message = await asyncio.get_running_loop().sock_recv(self._keeper, 1 << 18)
        except ConnectionResetError:
            return None
        return json.loads(message) if message else None

    def _take_out(self, data: bytes) -> None:
        self.stdout += data
        self._count(data)

    def _take_err(self, data: bytes) -> None:
        self.stderr += data
        del self.stderr[:-_KEPT_STDERR]
        self._count(data)

    def _count(self, data: bytes) -> None:
        self._printed += len(data)
        if self._printed > self._max_output:
            for pipe in self._pipes:
                pipe.close()
            self._ask_to_end()


@dataclass
class _Pipe(asyncio.Protocol):
    """The reading end of a program's output."""

    take: Callable[[bytes], None]
    closed: asyncio.Future[None] = field(default_factory=lambda: asyncio.Future())
    _transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.take(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _file_of(content: bytes) -> int:
    """Return the descriptor of an unnamed file with this content, at its beginning."""
    file = os.memfd_create("lightning_rl")
    with os.fdopen(file, "wb", closefd=False) as writer:
        writer.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


async def _send_files(channel: socket.socket, files: list[int]) -> None:
    while True:
        try:
            socket.send_fds(channel, [b"."], files)
            return
        except OSError as error:
            # Full, or too many descriptors on their way: the launcher still imports.
            if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                raise
        await asyncio.sleep(0.01)
