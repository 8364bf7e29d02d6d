"""Test hostile calls, each in a process of its own: all are refused clearly, or done right."""

import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.support.forked import begun
from tests.support.hostile.call import play

SURFACES = (
    "http_bodies", "http_sockets", "programs", "staged", "environments", "files", "conversions",
    "configurations", "trust", "audits",
)  # fmt: skip
MARK = "HOSTILE_CALL"
GRACE_SECONDS = 10.0


def mistake(surface, call):
    """Return what a call did wrong: how it ended, what it printed and what it left running."""
    with TemporaryDirectory(prefix="hostile-") as place:
        folder, output = Path(place, "here"), Path(place, "output")
        folder.mkdir()
        output.touch()
        mark = uuid.uuid4().hex
        environment = os.environ | {MARK: mark}
        process = begun(play, (surface, call.name), output, environment, folder)
        process.join(call.seconds)
        hangs = process.is_alive()
        if hangs:
            process.kill()
            process.join()
        left = still_running(mark, process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        printed = output.read_text(errors="replace")
    wrong = {
        "it hangs": hangs,
        f"it left {len(left)} processes behind": left,
        "it printed a traceback": "Traceback (most recent call last)" in printed,
        f"it did not say {call.says}": not all(words in printed for words in call.says),
        f"it ended with status {process.exitcode}": (process.exitcode == 0) != call.right,
    }
    found = "; ".join(what for what, is_so in wrong.items() if is_so)
    return found and f"{call.name}: {found}\n{printed}"


def still_running(mark, session):
    """Return processes that a call started and that did not end, after some time to do so.

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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("surface", SURFACES)
def test_hostile_calls_are_refused_clearly_or_done_right(surface):
    calls = import_module(f"tests.support.hostile.{surface}").CALLS
    assert len({call.name for call in calls}) == len(calls)
    with ThreadPoolExecutor(2) as pool:
        mistakes = list(filter(None, pool.map(partial(mistake, surface), calls)))
    assert not mistakes, "\n".join(mistakes)
