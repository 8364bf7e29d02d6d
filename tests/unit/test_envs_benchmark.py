"""What benchmarks.envs tells, from numbers that are known, and what its sides are judged by."""

import os
import sys

import pytest
import torch

pytest.importorskip("gymnasium")

from benchmarks import envs
from benchmarks.envs_task import FRAMES, returns


def run_of(seconds, *rewards, version="1.0"):
    """One run, whose first iteration is not counted."""
    return {
        "cpu_s": [99.0, seconds, seconds],
        "returns": list(rewards),
        "setup_cpu_s": 5.0,
        "version": version,
    }


@pytest.fixture
def sides():
    return {
        "ours": envs.summary([run_of(0.1, 400.0, 500.0), run_of(0.2, 450.0), run_of(0.1, 480.0)]),
        "torchrl": envs.summary([run_of(0.4, 480.0), run_of(0.4, 500.0)]),
        "sb3": envs.summary([run_of(0.2, 300.0), run_of(0.2, 200.0)]),
    }


def test_the_speed_is_that_of_the_median_run_without_its_first_iteration(sides):
    assert sides["ours"]["frames_per_cpu_s"] == pytest.approx(FRAMES / 0.1)
    assert sides["ours"]["returns"] == [450.0, 450.0, 480.0]
    assert sides["ours"]["return_std"] == pytest.approx(300**0.5)
    assert envs.summary([run_of(0.1, 7.0)])["return_std"] == 0


def test_the_fastest_peer_and_the_one_that_learns_most_may_be_two(sides):
    found = envs.beside_peers(sides)
    assert found["frames_ratio"] == pytest.approx(2.0)
    assert (found["return_ours"], found["return_best"]) == (460.0, 490.0)
    assert found["return_spread"] == pytest.approx(((300 + 200) / 2) ** 0.5)


def test_ratios_to_what_is_bare_are_of_each_iteration_but_a_runs_first():
    first = {"fit": 9.0, "bare": 1.0, "alone": 1.0}
    rows = [{"fit": fit, "bare": 1.0, "alone": 0.2} for fit in (1.02, 1.04, 1.3)]
    found = envs.beside_bare([{"rows": [first, *rows[:2]]}, {"rows": [first, rows[2]]}])
    assert found == pytest.approx(
        {"floor_ratio": 5.2, "fit_overhead": 1.04, "alone_frames_per_cpu_s": FRAMES / 0.2}
    )


def test_the_table_has_a_line_for_each_side_and_for_the_environment(sides):
    result = {"sides": sides, "frames": 99_328, "seeds": 3, "alone_frames_per_cpu_s": 102_400.0}
    head, _, *lines = envs.table(result)
    assert "return after 99,328 frames" in head
    assert "3 seeds" in head
    assert lines == [
        "| this library | 10,240 | 1.00 | 460 ± 17 |",
        "| torchrl 1.0 | 2,560 | 4.00 | 490 ± 14 |",
        "| Stable-Baselines3 1.0 | 5,120 | 2.00 | 250 ± 71 |",
        "| the environment alone | 102,400 | 0.10 | |",
    ]


def test_a_policy_is_judged_by_one_episode_for_each_seed():
    def left(observations):
        return torch.tensor([[50.0, 0.0]]).expand(len(observations), 2)

    def balanced(observations):
        lean = (observations[:, 2] + observations[:, 3]) * 1000
        return torch.stack([-lean, lean], 1)

    assert all(8 <= reward <= 11 for reward in returns(left, range(3)))
    assert min(returns(balanced, range(3))) > 150
    assert returns(left, [4, 5]) == [*returns(left, [4]), *returns(left, [5])]


def test_a_side_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"^envs_nothing: without a traceback\n.*envs_nothing"):
        envs.run(sys.executable, "envs_nothing", 1, 0)


def test_it_refuses_a_machine_that_is_not_quiet(monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.3, 1.0, 1.0))
    monkeypatch.setattr(sys, "argv", ["envs"])
    with pytest.raises(SystemExit) as caught:
        envs.main()
    assert caught.value.code == 2
    assert "load of the last minute is 1.30, more than 0.7" in capsys.readouterr().err
