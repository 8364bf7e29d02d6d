"""Test what benchmarks.envs tells, from numbers that are known, and how its sides are judged."""

import os
import sys

import pytest
import torch

pytest.importorskip("gymnasium")

from benchmarks.envs.__main__ import main
from benchmarks.envs.figures import beside_bare, headline, of_task, summary, table
from benchmarks.envs.runs import run
from benchmarks.envs.task import FRAMES, RECENT, TASKS, Progress, Task, Told, returns

TASK = Task("CartPole-v1", goal=475.0, iterations=2, most=4, seeds=2)


def run_of(seconds, reached, *rewards, version="1.0"):
    """Return one run, whose first iteration is not counted for its speed."""
    return {
        "cpu_s": [9.0, seconds, seconds, seconds],
        "reached": reached,
        "returns": list(rewards),
        "setup_cpu_s": 5.0,
        "version": version,
    }


@pytest.fixture
def cartpole():
    return of_task(
        TASK,
        {
            "ours": [run_of(0.1, 2, 400.0, 500.0), run_of(0.1, 4, 470.0)],
            "torchrl": [run_of(0.4, 4, 480.0), run_of(0.4, None, 500.0)],
            "sb3": [run_of(0.2, None, 300.0), run_of(0.2, None, 200.0)],
        },
    )


def test_a_run_that_never_comes_to_the_goal_counts_as_all_its_frames():
    found = summary(TASK, [run_of(0.1, 2, 400.0, 500.0), run_of(0.2, None, 470.0)])
    assert found["frames_to_goal"] == FRAMES * 3
    assert found["frames_to_goal_se"] == pytest.approx(FRAMES)  # of 2 and 4 iterations
    assert found["reached"] == 1
    assert found["cpu_s_to_goal"] == pytest.approx((9.1 + 9.6) / 2)
    assert found["frames_per_cpu_s"] == pytest.approx((FRAMES / 0.1 + FRAMES / 0.2) / 2)
    assert (found["return_mean"], found["return_se"]) == (460.0, 10.0)
    assert summary(TASK, [run_of(0.1, 2, 7.0)])["return_se"] == 0


def test_ours_stands_beside_all_peers_and_beside_the_best_of_them(cartpole):
    found = headline(cartpole)
    assert found["frames_to_475"] == FRAMES * 3
    assert found["frames_to_475_peers"] == found["frames_to_475_best"] == FRAMES * 4
    assert found["return_ratio"] == pytest.approx(460 / 370)
    assert found["return_best"] == 490
    assert found["frames_ratio"] == pytest.approx(2.0)
    assert found["cpu_ratio"] == pytest.approx(9.6 / 9.2)


def test_ratios_to_what_is_bare_are_of_each_iteration_but_a_runs_first():
    first = {"fit": 9.0, "bare": 1.0, "alone": 1.0}
    rows = [{"fit": fit, "bare": 1.0, "alone": 0.2} for fit in (1.02, 1.04, 1.3)]
    found = beside_bare([{"rows": [first, *rows[:2]]}, {"rows": [first, rows[2]]}])
    assert found == pytest.approx(
        {"floor_ratio": 5.2, "fit_overhead": 1.04, "alone_frames_per_cpu_s": FRAMES / 0.2}
    )


def test_the_table_has_a_line_for_each_side_and_for_the_environment(cartpole):
    head, _, *lines = table({"tasks": {"cartpole": cartpole}, "alone_frames_per_cpu_s": 102_400.0})
    assert head.startswith("| one thread | frames to the goal |")
    assert lines == [
        "| **CartPole-v1**, to 475 | of 4,096 | of 2 | | | after 2,048 |",
        "| this library | 3,072 ± 1,024 | 2 | 9.2 | 10,240 | 460 ± 10 |",
        "| torchrl 1.0 | 4,096 ± 0 | 1 | 10.2 | 2,560 | 490 ± 10 |",
        "| Stable-Baselines3 1.0 | 4,096 ± 0 | 0 | 9.6 | 5,120 | 250 ± 50 |",
        "| CartPole-v1 alone | | | | 102,400 | |",
    ]


def test_a_run_is_over_when_it_has_been_judged_and_has_come_to_the_goal():
    def left(observations):
        return (torch.tensor([[50.0, 0.0]]).expand(len(observations), 2),)

    progress = Progress(TASK, left)
    progress.begin()
    Told.returned.extend([475.0] * (RECENT - 1))
    assert not progress.iterated()
    assert progress.reached is None  # too few episodes
    Told.returned.extend([476.0])
    assert progress.iterated()
    assert (progress.reached, len(progress.judged)) == (2, 20)
    assert not Told.returned  # those that it was judged by are none of training
    never = Progress(TASK, left)
    never.begin()
    assert [never.iterated() for _ in range(4)] == [False, False, False, True]


def test_an_episode_tells_its_return_and_the_learner_gets_scaled_rewards():
    Told.returned.clear()
    env = TASKS["pendulum"].made()
    env.reset(seed=0)
    scaled = [env.step([0.0])[1] for _ in range(200)]
    assert pytest.approx([8 * sum(scaled)]) == Told.returned


def test_a_policy_is_judged_by_one_episode_for_each_seed():
    def left(observations):
        return (torch.tensor([[50.0, 0.0]]).expand(len(observations), 2),)

    def balanced(observations):
        lean = (observations[:, 2] + observations[:, 3]) * 1000
        return (torch.stack([-lean, lean], 1),)

    assert all(8 <= reward <= 11 for reward in returns(TASK, left, range(3)))
    assert min(returns(TASK, balanced, range(3))) > 150
    assert returns(TASK, left, [4, 5]) == [
        *returns(TASK, left, [4]),
        *returns(TASK, left, [5]),
    ]


def test_a_side_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"^envs.nothing: without a traceback\n.*envs.nothing"):
        run("nothing", "cartpole", 0)


def test_it_refuses_a_machine_that_is_not_quiet(monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.3, 1.0, 1.0))
    monkeypatch.setattr(sys, "argv", ["envs"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "load of the last minute is 1.30, more than 0.7" in capsys.readouterr().err
