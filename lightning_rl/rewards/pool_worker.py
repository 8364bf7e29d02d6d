"""A worker process of the reward pool, which forks a process for every sample.

So no sample finds what another left behind, and one that hangs or crashes affects no other. Results
come back as JSON, never as a pickle: unpickling would run whatever the sender likes.
"""

import contextlib
import inspect
import json
import os
import pickle
import resource
import select
import shutil
import signal
import tempfile
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from lightning_rl.rewards.calling import RewardFailure, only_score
from lightning_rl.rewards.log import RewardLog
from lightning_rl.rewards.parts import plain_score
from lightning_rl.run.processes.child import ending
from lightning_rl.run.processes.keeper import adopt_orphans, die_with_parent, end_all

FILES_MB = 64
"""Megabytes per file that a sample may write."""
_RESULT_BYTES = 65536  # what a pipe holds: the sample never waits for a reader
_ERROR_CHARACTERS, _TRACEBACK_CHARACTERS = 1000, 4000  # at most 12 bytes each in JSON


@dataclass(frozen=True)
class Limits:
    """Limits of one sample's process."""

    timeout_s: float
    memory_mb: int


def main(connection: Connection, home: str) -> None:
    """Serve samples until told to stop, or until the other end of the connection closes.

    ``home`` is an empty directory; it is removed at the end.
    """
    with contextlib.suppress(EOFError, ConnectionError):  # the other end is gone: nobody to tell
        server = Server(connection, pickle.loads(connection.recv_bytes()), home)
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # where memory runs out, the kernel takes samples, not the trainer
        try:
            adopt_orphans()
            server.serve()
        finally:
            shutil.rmtree(home, ignore_errors=True)


@dataclass
class Server:
    """Answers each request, a pickled sample, with its result as JSON.

    ``{"score": x, "log": {...}}``, ``{"error": reason, "traceback": text}`` if the function failed
    or could not be called, or ``{"fault": reason}`` if its process broke a limit or died.
    """

    connection: Connection
    limits: Limits
    home: str

    def serve(self) -> None:
        """Load the function, answer ``{}`` or ``{"error": reason}``, then grade samples."""
        try:
            function = pickle.loads(self.connection.recv_bytes())
            if {"pictures", "images"} & inspect.signature(function).parameters.keys():
                import_module("lightning_rl.vision.decoded")  # here, not in each process anew
        except Exception as error:  # importing a user's module may raise anything; it is sent on
            self.connection.send_bytes(_failed(RewardFailure.of(error)))
            return
        self.connection.send_bytes(_json())
        at_first = _own_limits()
        # A sample can lower them: then another worker grades the next.
        while (request := self.connection.recv_bytes()) and _own_limits() == at_first:
            self.connection.send_bytes(self._run(function, request))

    def _run(self, function: Any, request: bytes) -> bytes:
        folder = tempfile.mkdtemp(dir=self.home)
        reader, writer = os.pipe()
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        pid = os.fork()
        if pid == 0:
            self._be_sample(function, request, folder, mapped, reader, writer)
        os.close(writer)
        in_time = self._wait(pid)
        status = end_all(pid)
        os.set_blocking(reader, False)
        with os.fdopen(reader, "rb", buffering=0) as results:
            result = results.read(_RESULT_BYTES)
        shutil.rmtree(folder, ignore_errors=True)
        if not in_time:
            return _json(fault=f"ran longer than timeout_s={self.limits.timeout_s:g}")
        if os.WIFSIGNALED(status):
            return _json(fault=f"its process {ending(-os.WTERMSIG(status))}")
        if not result:
            code = os.WEXITSTATUS(status)
            return _json(fault=f"its process ended without a score (exit status {code})")
        return result

    def _be_sample(
        self, function: Any, request: bytes, place: str, mapped: int, reader: int, writer: int
    ) -> NoReturn:
        try:
            os.close(reader)
            self.connection.close()
            me = os.getpid()
            try:
                _confine(place, self.limits, mapped)
            except Exception as error:  # nothing of the sample has run: it is not to blame
                failure = RewardFailure.of(error)
                result = _json(error=f"its process could not be confined: {failure.reason}")
            else:
                result = _grade(function, request, self.limits)
            if os.getpid() == me:  # and no copy that the function forked
                os.write(writer, result)
        finally:
            os._exit(0)  # whatever happened: this process must not become a second server

    def _wait(self, pid: int) -> bool:
        """Wait; tell whether the process ended in time, with someone still waiting for it."""
        descriptor = os.pidfd_open(pid)
        try:
            watched = [descriptor, self.connection.fileno()]
            ready, _, _ = select.select(watched, [], [], self.limits.timeout_s)
        finally:
            os.close(descriptor)
        return descriptor in ready


def _own_limits() -> list[tuple[int, int]]:
    """Return all resource limits of this process."""
    kinds = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return [resource.getrlimit(getattr(resource, kind)) for kind in kinds]


def _confine(place: str, limits: Limits, mapped: int) -> None:
    """Give one sample's process its limits, its directory, and no output.

    ``mapped``: bytes of address space already in use, mostly by imports.
    """
    os.setsid()
    die_with_parent()
    # As Python handles it, what the sample starts could interrupt the sample itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(place)
    os.environ |= {"HOME": place, "TMPDIR": place}
    tempfile.tempdir = None
    bounds = {
        resource.RLIMIT_AS: mapped + limits.memory_mb * 2**20,
        resource.RLIMIT_FSIZE: FILES_MB * 2**20,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def _grade(function: Any, request: bytes, limits: Limits) -> bytes:
    try:
        sample = pickle.loads(request)
        score = only_score(function(**sample))
        if isinstance(score, RewardFailure):
            return _failed(score)
        log = RewardLog.of(sample) or RewardLog(1)
        log.require_complete()
        result = _json(score=plain_score(score), log=log.to_dict())
        if len(result) > _RESULT_BYTES:
            return _json(error=f"score and log take {len(result)} bytes, max {_RESULT_BYTES}")
        return result
    except MemoryError:
        return _json(fault=f"needed more than memory_mb={limits.memory_mb}")
    except BaseException as error:  # also SystemExit and KeyboardInterrupt end the sample only
        return _failed(RewardFailure.of(error))


def _failed(failure: RewardFailure) -> bytes:
    reason, traceback = failure.reason, failure.traceback
    return _json(error=reason[:_ERROR_CHARACTERS], traceback=traceback[-_TRACEBACK_CHARACTERS:])


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()
