"""Environments in processes: what goes wrong there is told here, whoever chooses the actions."""

import os
import signal

import pytest

from lightning_rl import EnvError, GymWorkers, PooledGym
from tests.env_agents import agent_for, collected

RAISES = r"environment \d in step 3 of its episode 0, of seed \d+ raised ValueError"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "words"),
    [
        (PooledGym, "raises", RAISES),
        (PooledGym, "hangs", "a step took longer than max_step_seconds=3"),
        (GymWorkers, "raises", RAISES),
        (GymWorkers, "hangs", r"took longer than max_step_seconds=3;.*environment \d in step 3 of"),
        (GymWorkers, "nan", r"environment [0-4] gave \[nan, 0.0\] as observation at step 3"),
    ],
)
def test_what_goes_wrong_in_a_process_says_where(started, kind, how, words):
    made = started(kind("tests.worlds:Faulty-v0", {"how": how}, workers=2), seconds=3.0)
    with pytest.raises(EnvError, match=words):
        collected(made, agent_for(made), 0, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gone", "words"), [(PooledGym, 0, "0, 2, 4"), (GymWorkers, 1, "3, 4")]
)
def test_a_process_that_is_gone_is_told(started, kind, gone, words):
    made = started(kind("tests.worlds:Walk-v0", workers=2))
    agents = agent_for(made)
    made.collect(agents, 0, 3)
    process = made.processes.processes[gone]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(EnvError, match=f"the process of environments {words} is gone"):
        made.collect(agents, 1, 30)
