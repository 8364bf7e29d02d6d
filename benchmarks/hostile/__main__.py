"""Hostile calls, by surface: is each refused clearly, or done right?

    python -m benchmarks.hostile [--only http staged] [--match PATTERN] [--jobs 2] [--show]

Every call runs in a process of its own. It is ``clear`` (failed as it should, with its message),
``right`` (went well as it should), or one of: ``tracebacks`` (a Python stack trace was printed),
``hangs`` (did not end in time, or left a process behind), ``silent`` (anything else: a wrong
status, or not a word of what was the matter). The last line is JSON.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.hostile.call import Call
from benchmarks.hostile.play import calls_of
from benchmarks.support.forked import started

SURFACES = (
    "http",
    "programs",
    "staged",
    "environments",
    "files",
    "conversions",
    "configurations",
    "trust",
    "audits",
    "sandboxes",
)
VERDICTS = ("clear", "right", "tracebacks", "hangs", "silent")
MARK = "HOSTILE_CALL"
GRACE_SECONDS = 10.0


class Outcome(NamedTuple):
    surface: str
    name: str
    verdict: str
    printed: str


def outcome_of(surface: str, call: Call) -> Outcome:
    """Play a call, and judge it by how it ended, what it printed and what it left running."""
    with TemporaryDirectory(prefix="hostile-") as place:
        folder, output = Path(place, "here"), Path(place, "output")
        folder.mkdir()
        output.touch()
        mark = uuid.uuid4().hex
        process = started(
            "benchmarks.hostile.play",
            [surface, call.name],
            output,
            environment={**os.environ, MARK: mark},
            folder=folder,
        )
        process.join(call.seconds)
        hangs = process.is_alive()
        if hangs:
            process.kill()
            process.join()
        left = _still_running(mark, process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        printed = output.read_text(errors="replace")
    if hangs or left:
        printed += "\n(did not end in time)" if hangs else f"\n({len(left)} processes left behind)"
        return Outcome(surface, call.name, "hangs", printed)
    if "Traceback (most recent call last)" in printed:
        return Outcome(surface, call.name, "tracebacks", printed)
    told = all(words in printed for words in call.says)
    if not told or (process.exitcode == 0) != call.right:
        printed += f"\n(status {process.exitcode}; expected {call.says})"
        return Outcome(surface, call.name, "silent", printed)
    return Outcome(surface, call.name, "right" if call.right else "clear", printed)


def _still_running(mark: str, session: int) -> list[int]:
    """Processes that a call started and that did not end, after some time to do so.

    What was forked shares the session of the call, and what was executed has its environment.
    """
    wanted = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                marked = wanted in (process / "environ").read_bytes().split(b"\0")
                if marked or os.getsid(int(process.name)) == session:
                    found.append(int(process.name))
            except OSError:  # it ended meanwhile, or is somebody else's
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=SURFACES, choices=SURFACES)
    parser.add_argument("--match", default="", help="a regular expression for names of calls")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print what each call printed")
    options = parser.parse_args()
    chosen = [
        (surface, call)
        for surface in options.only
        for name, call in calls_of(surface).items()
        if re.search(options.match, name)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda pair: outcome_of(*pair), chosen))
    for outcome in outcomes:
        bad = outcome.verdict not in ("clear", "right")
        if bad or options.show:
            print(f"--- {outcome.surface}: {outcome.name}: {outcome.verdict}\n{outcome.printed}")
    print(f"| surface | calls | {' | '.join(VERDICTS)} |\n|{'---|' * (len(VERDICTS) + 2)}")
    for surface in options.only:
        of_it = Counter(outcome.verdict for outcome in outcomes if outcome.surface == surface)
        counts = " | ".join(str(of_it[verdict]) for verdict in VERDICTS)
        print(f"| {surface} | {of_it.total()} | {counts} |")
    counted = Counter(outcome.verdict for outcome in outcomes)
    print(json.dumps({"calls": len(outcomes)} | {v: counted[v] for v in VERDICTS}))
    return int(any(counted[v] for v in ("tracebacks", "hangs", "silent")))


if __name__ == "__main__":
    sys.exit(main())
