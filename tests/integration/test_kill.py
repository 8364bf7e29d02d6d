"""A run that is killed with SIGKILL goes on exactly: some points of ``benchmarks.kill``.

Slow: each case runs a command to the end three times: whole, until it is killed, and resumed.
"""

import json

import pytest

from benchmarks import kill_engines
from benchmarks.kill import __main__ as kill
from tests.support.tiers import slow


def killed(capsys, *arguments: str, benchmark=kill) -> dict:
    """Return the last line of the table."""
    status = benchmark.main(list(arguments))
    said = capsys.readouterr().out
    assert status == 0, said
    return json.loads(said.splitlines()[-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("points", "seed"), [(1, 1), slow(3, 4)])
def test_a_killed_run_equals_the_uninterrupted_one(capsys, points, seed):
    options = "--points", str(points), "--engine", "TransformersEngine"
    result = killed(capsys, *options, "--seed", str(seed))
    assert (result["points"], result["equal"]) == (points, points)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_of_a_lora_on_a_packed_base_equals_the_uninterrupted_one(capsys):
    options = "--quantization", "NF4", "--points", "1", "--engine", "TransformersEngine"
    result = killed(capsys, *options, "--seed", "2")
    assert (result["points"], result["equal"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_on_pictures_equals_the_uninterrupted_one(capsys):
    options = "--pictures", "--points", "2", "--engine", "TransformersEngine"
    result = killed(capsys, *options, "--seed", "3")
    assert (result["points"], result["equal"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_killed_asynchronous_runs_lose_no_prompt_and_train_on_none_twice(capsys):
    result = killed(
        capsys, "--points", "2", "--engine", "TransformersEngine", "--collector", "AsyncCollector"
    )
    assert (result["points"], result["equal"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_and_trainer_killed_equal_an_uninterrupted_run(capsys):
    options = "--program", "--points", "1", "--engine", "TransformersEngine"
    result = killed(capsys, *options)
    assert (result["points"], result["equal"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_servers_are_killed_equals_one_that_was_left_alone(capsys):
    options = "--kills", "2", "--leave", "0.5", "--seed", "1"
    result = killed(capsys, *options, benchmark=kill_engines)
    assert (result["kills"], result["with_notice"]) == (2, 1)
    assert result["equal"]
