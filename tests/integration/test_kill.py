"""A run that is killed with SIGKILL goes on exactly: some points of ``benchmarks.kill``."""

import json
import subprocess
import sys

import pytest


def kill_table(*arguments: str) -> tuple[dict, str]:
    command = [sys.executable, "-m", "benchmarks.kill", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.timeout(900)
def test_two_killed_runs_equal_the_uninterrupted_one():
    result, _ = kill_table("--points", "2", "--engine", "TransformersEngine", "--seed", "1")
    assert (result["points"], result["equal"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_killed_asynchronous_runs_lose_no_prompt_and_train_on_none_twice():
    result, _ = kill_table(
        "--points", "2", "--engine", "TransformersEngine", "--collector", "AsyncCollector"
    )
    assert (result["points"], result["equal"]) == (2, 2)


@pytest.mark.timeout(900)
def test_programs_and_trainer_killed_equal_an_uninterrupted_run():
    options = "--program", "--points", "1", "--engine", "TransformersEngine"
    result, _ = kill_table(*options)
    assert (result["points"], result["equal"]) == (1, 1)
