"""Isolated: runs a reward function in separate processes, where it can do no harm."""

import asyncio
import json
import os
import pickle
import shutil
import subprocess
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.rewards import pool_worker
from lightning_rl.rewards.calling import (
    PerSample,
    RewardFailure,
    RewardFunction,
    Score,
    is_async,
    reward_name,
    score_range,
)
from lightning_rl.rewards.log import RewardLog
from lightning_rl.rewards.pool_worker import Limits
from lightning_rl.run.processes.child import PythonChild
from lightning_rl.run.processes.machine import usable_cores

START_S = 120.0
"""Time limit, in seconds, for a worker to start and import the function's module."""
GRACE_S = 10.0
"""Seconds after ``timeout_s`` until the worker itself counts as stuck."""


@configurable
class Isolated(PerSample):
    """Runs a reward function per completion, each in a fresh process with limits.

    They protect from accidents, not from code that means harm: a function that runs what a model
    wrote should run it as a command of its own, under :func:`lightning_rl.extend.sandboxed`.

    A completion whose process exceeds its time or memory, crashes or raises is FAILED with that
    reason, and everything that the process started is killed; the others are graded. The function's
    output is discarded. It runs in an empty directory, which is removed afterwards. Processes are
    forked from a few workers that have imported the function's module, and nothing of the trainer.

    Args:
        function: a plain reward function, or an object with ``__call__``, of an importable module;
            it gets lists of one element.
        workers: number of completions graded at the same time; None: one per usable core.
        timeout_s: wall-clock seconds per completion.
        memory_mb: MiB that a completion's process may use beyond what its imports take.
        fault_score: score for completions whose process broke a limit or died; None: FAILED. A
            function that raises is always FAILED.

    Raises:
        ConfigError: if the function is ``async`` or cannot be imported in another process, or
            values are out of range.
    """

    def __init__(
        self,
        function: RewardFunction,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        fault_score: float | None = None,
    ) -> None:
        require_at_least(1, workers=workers, memory_mb=memory_mb)
        require_at_least(0.001, timeout_s=timeout_s)
        require_finite(fault_score=fault_score)
        super().__init__(function)
        if fault_score is not None:
            low, high = score_range(function)
            self.score_range = (min(low, fault_score), max(high, fault_score))
        self.workers = workers or usable_cores()
        self.limits = Limits(timeout_s, memory_mb)
        self.fault_score = fault_score
        self._pickled = _pickled(function)
        self._threads: ThreadPoolExecutor | None = None
        self._idle: deque[_Worker] = deque()

    async def grade_one(self, sample: dict[str, Any]) -> Score:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix=self.__name__)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, self._grade, sample)
        if "score" in result:
            return _logged(RewardLog.of(sample), result)
        if "fault" in result:
            return self.fault(sample, str(result["fault"]))
        return RewardFailure(str(result.get("error")), str(result.get("traceback", "")))

    def fault(self, sample: dict[str, Any], reason: str) -> Score:
        """Return the score of a completion whose process broke a limit or died."""
        return RewardFailure(reason) if self.fault_score is None else self.fault_score

    def close(self) -> None:
        """Wait for running gradings, and end the workers; grading again starts new ones."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        while self._idle:
            self._idle.pop().close()

    # As many threads as workers: one that finds no idle worker may start one.
    def _grade(self, sample: dict[str, Any]) -> dict[str, Any]:
        for again in (False, True):
            try:
                worker = self._start() if again or not self._idle else self._idle.pop()
            except ConfigError as error:
                return {"error": str(error)}
            result = worker.grade(sample)
            if result is not None:
                self._idle.append(worker)
                return result
            worker.kill()  # it may be what it graded before that made it of no use: ask a new one
        return {"error": "its worker died or hung, and so did a new one"}

    def _start(self) -> "_Worker":
        worker = _Worker(self.limits)
        refusal = worker.load(self._pickled)
        if refusal is None:
            return worker
        worker.kill()
        raise ConfigError(f"a worker could not load reward {self.__name__}: {refusal}")


def _logged(log: RewardLog | None, result: dict[str, Any]) -> Score:
    """Add what the completion's process logged to the log, and return the score."""
    if log is not None:
        try:
            log.add(result["log"])
        except (AttributeError, KeyError, TypeError, ValueError):
            return RewardFailure("it overwrote its own result")
    return result["score"]


class _Worker(PythonChild):
    """The trainer's end of a worker process; see ``pool_worker`` for the other end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        env = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        self.home = tempfile.mkdtemp(prefix="lightning_rl_reward_")
        super().__init__(pool_worker.main, self.home, env=env, stdout=subprocess.DEVNULL)

    def load(self, function: bytes) -> str | None:
        """Let the worker import the function; return why it could not, else None."""
        try:
            self.connection.send_bytes(pickle.dumps(self.limits))
            self.connection.send_bytes(function)
            if not self.connection.poll(START_S):
                return f"not done after {START_S:g} s"
            return json.loads(self.connection.recv_bytes()).get("error")
        except (EOFError, OSError):
            return "the worker died; its error is printed above"

    def grade(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result of a sample; None if the worker can no longer be used."""
        request = pickle.dumps(sample)
        try:
            self.connection.send_bytes(request)
            if not self.connection.poll(self.limits.timeout_s + GRACE_S):
                return None
            answer = self.connection.recv_bytes()
        except (EOFError, OSError):
            return None
        try:
            result = json.loads(answer)
        except (ValueError, RecursionError):
            result = None
        return result if isinstance(result, dict) else {"fault": "it overwrote its own result"}

    def close(self) -> None:
        """Ask the worker to end and remove its directory; kill it after ``GRACE_S`` seconds."""
        with suppress(OSError):
            self.connection.send_bytes(b"")
            self.ended_within(GRACE_S)
        self.kill()

    def kill(self) -> None:
        super().kill()
        shutil.rmtree(self.home, ignore_errors=True)


def _pickled(function: RewardFunction) -> bytes:
    name = reward_name(function)
    if is_async(function):
        raise ConfigError(
            f"Isolated needs a plain function, but reward {name} is async: use Remote instead"
        )
    if getattr(function, "__module__", None) == "__main__":
        raise ConfigError(
            f"reward {name} is defined in the script itself, which other processes cannot import: "
            "move it to a module and import it"
        )
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"reward {name} cannot be sent to another process ({error}): define it at the top of a "
            "module, and give its class only attributes that can be pickled"
        ) from error
