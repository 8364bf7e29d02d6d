"""Threads of OpenMP sleep soon while other processes want the cores, unless the user chose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.run import openmp

pytestmark = pytest.mark.skipif(
    not (Path("/proc/self/schedstat").exists() and openmp.loaded_libgomps()),
    reason="torch computes without libgomp here, or the kernel does not count",
)

CROWDED = """
import os, subprocess, sys, threading, time
from lightning_rl.run.openmp import WaitingShare
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
share, end = WaitingShare(), time.monotonic() + 1
while time.monotonic() < end:
    pass
print(share.since_last())
for neighbour in neighbours:
    neighbour.kill()
    neighbour.wait()
"""


SLEEPING = """
import json, os, time
import torch
from lightning_rl.run.openmp import SleepingTeam, loaded_libgomps
a = torch.ones(64, 64)
a @ a
counts = [len(os.listdir("/proc/self/task"))]
team = SleepingTeam(loaded_libgomps()[:1])
counts += [len(os.listdir("/proc/self/task")), int((a @ a).sum())]
team.end()
give_up = time.monotonic() + 30  # threads end a little later
while len(os.listdir("/proc/self/task")) > counts[0] and time.monotonic() < give_up:
    time.sleep(0.01)
print(json.dumps([*counts, len(os.listdir("/proc/self/task"))]))
"""


def run_alone(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_process_knows_that_it_waits_for_a_core():
    """One core, two busy neighbours: about two thirds of the time."""
    assert 0.2 < float(run_alone(CROWDED)) < 1.0


def test_the_share_counts_threads_that_came_and_went(monkeypatch):
    readings = [
        {"1": (10, 0), "2": (5, 5)},
        {"1": (16, 2), "3": (1, 1)},  # 2 has ended, 3 is new: 7 ran, 3 waited
        {"1": (16, 2), "3": (1, 1)},
    ]
    monkeypatch.setattr(openmp, "_read_schedstat", lambda: readings.pop(0))
    share = openmp.WaitingShare()
    assert share.since_last() == pytest.approx(0.3)
    assert share.since_last() == 0.0


def test_a_sleeping_team_has_more_threads_than_there_are_cores_until_it_ends():
    """In a process of its own, whose threads are known: one of Python's, and a team's others."""
    before, during, product, after = json.loads(run_alone(SLEEPING))
    assert during == before + 1 + len(os.sched_getaffinity(0))
    assert product == 64**3
    assert after == before


def test_the_team_sleeps_from_crowded_to_free(monkeypatch):
    """Begins above 0.10, ends below 0.05, and changes nothing in between."""
    shares = [0.0, 0.07, 0.2, 0.07, 0.3, 0.01, 0.07, 0.5]
    events: list[str] = []

    class Team:
        def __init__(self, libraries: object) -> None:
            events.append(f"begin with {len(shares)} left")

        def end(self) -> None:
            events.append(f"end with {len(shares)} left")

    class Pause:
        def wait(self, _: float) -> bool:
            return not shares

    monkeypatch.setattr(openmp.WaitingShare, "since_last", lambda self: shares.pop(0))
    monkeypatch.setattr(openmp, "SleepingTeam", Team)
    monkeypatch.setattr(openmp.threading, "Event", Pause)
    openmp._watch([])
    assert events == ["begin with 5 left", "end with 2 left", "begin with 0 left"]


@pytest.fixture
def unwatched(monkeypatch):
    monkeypatch.setattr(openmp, "_watches", [])
    monkeypatch.setattr(openmp, "_watch", lambda libraries: None)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def test_it_watches_once(unwatched):
    openmp.stop_spinning_when_crowded()
    openmp.stop_spinning_when_crowded()
    assert len(openmp._watches) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")]
)
def test_what_the_user_chose_stays(unwatched, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    openmp.stop_spinning_when_crowded()
    assert not openmp._watches
