"""A process that hosts a verifiers environment, under that environment's own Python."""

import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_rl.errors import ConfigError
from lightning_rl.run.keeper import kept
from lightning_rl.run.loop import cancel_here
from lightning_rl.serving.results import last_lines, signal_name
from lightning_rl.serving.verifiers.hosting import Hosting

_HOST = str(Path(__file__).with_name("host"))
_LONGEST_ANSWER = 2**24  # bytes
_GRACE_S = 10.0
"""How long a worker may take to end what the environment has started."""
_START_S = 300.0
"""How long one may take to start; importing verifiers alone takes some 7 CPU seconds."""


class WorkerError(RuntimeError):
    """What an environment, or the worker that hosts it, could not do."""


class WorkerDied(WorkerError):
    """The worker ended in the middle of what it was asked."""


class Worker:
    """One process. Orders are JSON lines that it reads, answers lines that it writes."""

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting
        self.seats: list[str] = []
        self.load = 0
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Until it has ended, by itself or by us."""
        return self._reading is not None and not self._reading.done()

    async def start(self) -> None:
        """Start it, and wait until the environment is loaded.

        Raises:
            ConfigError: if it cannot be.
        """
        self.hosting.check()
        self._process = process = await asyncio.create_subprocess_exec(
            *kept([self.hosting.program, _HOST], grace_s=_GRACE_S),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            env=self.hosting.variables(),
            limit=_LONGEST_ANSWER,
            start_new_session=True,  # or Ctrl-C in a terminal would reach it too
        )
        assert process.stdout is not None
        try:
            self._send(self.hosting.configuration())
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
            said: dict[str, Any]
            said = json.loads(line) if line else {"refused": await self._end_told()}
        except TimeoutError:
            said = {"refused": f"it did not start within {_START_S:g} s"}
        except BaseException:
            await self.close()
            raise
        if "refused" in said:
            await self.close()
            raise ConfigError(
                f"environment {self.hosting.environment!r} under {self.hosting.program}: "
                f"{_explained(said['refused'], self.hosting)}"
            )
        self.seats = said["seats"]
        self._reading = asyncio.create_task(self._read(process.stdout))

    async def ask(self, **order: Any) -> dict[str, Any]:
        """Have it do something, and return its answer.

        Raises:
            WorkerError: if that went wrong.
            WorkerDied: if the worker ended before.
        """
        if not self.alive:
            raise WorkerDied(await self._end_told())
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.load += 1
        try:
            self._send({"id": number, **order})
            answer = await future
        except asyncio.CancelledError:
            if self.alive:
                self._send({"id": number, "cancel": True})
            raise
        finally:
            self.load -= 1
            self._asked.pop(number, None)
        if answer.get("error"):
            raise WorkerError(answer["error"])
        return answer

    async def close(self) -> None:
        """End it, with what the environment has started."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
        with suppress(ProcessLookupError):
            process.terminate()  # its keeper, which ends all of it at once
        await process.wait()
        if self._reading is not None:
            await cancel_here([self._reading])
        self._give_up("the worker was closed")
        self._process = None
        self._log.close()

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(order, default=str).encode() + b"\n")

    async def _read(self, answers: asyncio.StreamReader) -> None:
        try:
            while line := await answers.readline():
                answer = json.loads(line)
                future = self._asked.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(answer)
            end = await self._end_told()
        except ValueError as error:  # more than fits, or no JSON
            end = f"the worker does not say what it should: {error}"
        self._give_up(end)

    def _give_up(self, end: str) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(WorkerDied(end))

    async def _end_told(self) -> str:
        """How it ended, and the last that it printed."""
        if self._process is None:
            return "the worker was closed"
        status = await self._process.wait()
        how = signal_name(-status) if status < 0 else f"exit status {status}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4096))
        return f"the worker ended with {how}{last_lines(self._log.read())}"


def _explained(reason: str, hosting: Hosting) -> str:
    if "No module named 'verifiers'" in reason or "PackageNotFoundError" in reason:
        return f"verifiers is not installed there; {hosting.recipe()}"
    return reason
