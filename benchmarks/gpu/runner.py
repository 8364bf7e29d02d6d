"""Runs checks one after another, each in a process of its own, and tells what came of each."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import last_lines
from benchmarks.gpu.table import Check

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # nothing is to be looked up: checks make their models
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONFAULTHANDLER": "1",  # a crash says where
}
Record = dict[str, Any]


class Process:
    """A check's process, which leads a group of its own, so that nothing of it is left behind."""

    def __init__(self, check: Check, device: str, scratch: Path) -> None:
        self.check = check
        self._record = scratch / f"{check.name}.json"
        self._output = scratch / f"{check.name}.log"
        self._record.unlink(missing_ok=True)
        arguments = (check.target, json.dumps(dict(check.options)), device, scratch, self._record)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.child", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=ENVIRONMENT | os.environ,
                start_new_session=True,
            )

    def run(self, limit_s: float) -> Record:
        """Let it begin, wait until it ends or its time is over, and return what it found."""
        begin = time.perf_counter()
        try:
            self._process.communicate(b"go\n", timeout=limit_s)
            over_time = False
        except subprocess.TimeoutExpired:
            over_time = True
        seconds = time.perf_counter() - begin
        self.end()
        return {"check": self.check.name} | self._found(over_time, limit_s) | {"seconds": seconds}

    def end(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):  # all of them are gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _found(self, over_time: bool, limit_s: float) -> Record:
        left: Record = {"outcome": None, "figures": {}, "error": None}
        if self._record.exists():
            left = json.loads(self._record.read_text())
        if not over_time and left["outcome"] is not None:
            return left
        how = f"ended after its {limit_s:.3g} s" if over_time else self._ending()
        output = last_lines(self._output.read_text(errors="replace"))
        error = "\n".join(filter(None, (left["error"], how, output)))
        return left | {"outcome": "fail", "error": error}

    def _ending(self) -> str:
        status = self._process.returncode
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended by itself with status {status}"


def run_all(
    checks: Sequence[Check],
    device: str,
    scratch: Path,
    seconds: float,
    tell: Callable[[Record], None],
) -> Record:
    """Run checks until all are done or the time is over, and tell each record; return the summary.

    While one runs, the next one's process already imports what it needs.

    Args:
        checks: in this order.
        device: ``cuda`` or ``cpu``.
        scratch: a directory for what checks leave to each other, their records and their output.
        seconds: of all checks together; those for which none are left are skipped.
        tell: called with each record as soon as there is one.
    """
    begin = time.perf_counter()
    records: list[Record] = []
    waiting = [check for check in checks if check.needs is None or find_spec(check.needs)]
    ready: Process | None = None
    try:
        for check in checks:
            left = seconds - (time.perf_counter() - begin)
            if check not in waiting:
                record = _skipped(check, f"{check.needs} is not installed")
            elif left <= 0:
                record = _skipped(check, f"the {seconds:.0f} s of all checks are over")
            else:
                process, ready = ready or Process(check, device, scratch), None
                following = waiting[waiting.index(check) + 1 :]
                ready = Process(following[0], device, scratch) if following else None
                record = process.run(min(check.limit_s, left))
            record = {"device": device} | record | {"seconds": round(record["seconds"], 2)}
            records.append(record)
            tell(record)
    finally:
        if ready is not None:
            ready.end()
    return summary_of(records, device, time.perf_counter() - begin)


def summary_of(records: Sequence[Record], device: str, seconds: float) -> Record:
    """Counts by outcome, and the names of those that did not pass."""
    names: dict[str, list[str]] = {"pass": [], "fail": [], "skipped": []}
    for record in records:
        names[record["outcome"]].append(record["check"])
    return {
        "summary": {outcome: len(of_it) for outcome, of_it in names.items()},
        "failed": names["fail"],
        "skipped": names["skipped"],
        "device": device,
        "seconds": round(seconds, 1),
    }


def _skipped(check: Check, why: str) -> Record:
    return {
        "check": check.name,
        "outcome": "skipped",
        "figures": {},
        "error": why,
        "seconds": 0.0,
    }
