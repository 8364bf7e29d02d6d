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
@pytest.mark.parametrize(
    ("points", "options"),
    [
        (1, ["--seed", "1"]),
        slow(3, ["--seed", "4"]),
        slow(1, ["--quantization", "NF4", "--seed", "2"]),  # a LoRA on a packed base
        slow(2, ["--pictures", "--seed", "3"]),
        slow(2, ["--collector", "AsyncCollector"]),  # no prompt is lost, and none trained on twice
        slow(1, ["--program"]),  # programs are killed, too
    ],
)
def test_a_killed_run_equals_the_uninterrupted_one(capsys, points, options):
    result = killed(capsys, "--points", str(points), "--engine", "TransformersEngine", *options)
    assert (result["points"], result["equal"]) == (points, points)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_servers_are_killed_equals_one_that_was_left_alone(capsys):
    options = "--kills", "2", "--leave", "0.5", "--seed", "1"
    result = killed(capsys, *options, benchmark=kill_engines)
    assert (result["kills"], result["with_notice"]) == (2, 1)
    assert result["equal"]
