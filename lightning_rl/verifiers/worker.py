"""A process that hosts a verifiers environment, under that environment's own Python."""

import asyncio
import itertools
import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_rl.errors import ConfigError
from lightning_rl.run.loop.background import cancel_here
from lightning_rl.run.processes.child import ending, last_lines, tail
from lightning_rl.run.processes.keeper import kept
from lightning_rl.verifiers.hosting import Hosting

_HOST = str(Path(__file__).with_name("host"))
_LONGEST_ANSWER = 2**24  # bytes
_GRACE_S = 10.0
"""Seconds for a worker to stop what the environment has started."""
_START_S = 300.0
"""Seconds for a worker to start; importing verifiers alone takes about 7 CPU seconds."""


_WRONG = "the worker sent an invalid message: {}"


class WorkerError(RuntimeError):
    """An environment, or the worker that hosts it, failed to do something."""


class WorkerDied(WorkerError):
    """The worker ended before it answered."""


class Worker:
    """One worker process; it reads orders and writes answers as lines of JSON."""

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting
        self.seats: list[str] = []
        self.load = 0
        self._numbers = itertools.count(1)
        self._cancelled: set[int] = set()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """True if the worker accepts orders and has not ended or been closed."""
        if self._process is None or self._process.stdin is None or self._reading is None:
            return False
        return not (self._reading.done() or self._process.stdin.is_closing())

    async def start(self) -> None:
        """Start the worker, and wait until the environment is loaded.

        Raises:
            ConfigError: if it cannot be started.
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
            answer = await asyncio.wait_for(self._first(process.stdout), _START_S)
        except TimeoutError:
            answer = {"refused": f"it did not start within {_START_S:g} s"}
        except BaseException:
            await self.close()
            raise
        if "refused" in answer:
            await self.close()
            why = str(answer["refused"])
            if "No module named 'verifiers'" in why or "PackageNotFoundError" in why:
                why = f"verifiers is not installed there; {self.hosting.recipe()}"
            raise ConfigError(
                f"environment {self.hosting.environment!r} under {self.hosting.program}: {why}"
            )
        self.seats = answer["seats"]
        self._reading = asyncio.create_task(self._read(process.stdout))

    async def _first(self, answers: asyncio.StreamReader) -> dict[str, Any]:
        """Return the worker's first message: its ``seats``, or why it ``refused`` to start."""
        try:
            if not (line := await answers.readline()):
                return {"refused": await self._end_told()}
            answer = _object(line)
        except ValueError as error:
            return {"refused": _WRONG.format(error)}
        seats = answer.get("seats")
        if "refused" not in answer and not (isinstance(seats, list) and seats):
            return {"refused": _WRONG.format(f"no seats in {line!r:.200}")}
        return answer

    async def ask(self, **order: Any) -> dict[str, Any]:
        """Send an order, and return its answer.

        Raises:
            WorkerError: if the order failed.
            WorkerDied: if the worker ended before it answered.
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
            self._cancelled.add(number)  # its answer may be on its way
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
        """Stop the worker, with everything the environment has started."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
        self._kill()
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
        """Deliver answers; at their end, or at the first invalid one, fail the orders under way."""
        end = "the worker was closed"
        try:
            while line := await answers.readline():
                self._take(line)
            end = await self._end_told()
        except ValueError as error:  # also of a line that is longer than fits
            end = _WRONG.format(error)
        finally:
            self._kill()  # one that cannot be understood, or says no more, is of no use
            self._give_up(end)

    def _take(self, line: bytes) -> None:
        answer = _object(line)
        number = answer.get("id")
        if type(number) is not int:
            raise ValueError(f"{line!r:.200} answers no order")
        future = self._asked.pop(number, None)
        if future is None and number not in self._cancelled:
            raise ValueError(f"{line!r:.200} answers no order")
        if future is not None and not future.done():  # else nobody waits any more
            future.set_result(answer)

    def _kill(self) -> None:
        """Make its keeper end it at once, with all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def _give_up(self, end: str) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(WorkerDied(end))

    async def _end_told(self) -> str:
        """Return how it ended and the last lines it printed; kill it if it does not end."""
        if self._process is None:
            return "the worker was closed"
        how = "closed its output, and was killed"
        with suppress(TimeoutError):
            status = await asyncio.wait_for(self._process.wait(), _GRACE_S)
            how = ending(status)
        self._kill()
        return f"the worker {how}{last_lines(tail(self._log, 4096))}"


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{line!r:.200} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{line!r:.200} is not a JSON object")
    return value
