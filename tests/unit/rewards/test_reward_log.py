"""Test what TRL hands its reward functions, and what becomes of what they log."""

import asyncio
import json
import math

import numpy as np
import pytest

from lightning_rl.callbacks.preview import as_markdown, preview_table
from lightning_rl.collect.stats import evaluation_metrics, rollout_metrics
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.log import TrainerState
from lightning_rl.rewards.remote import Remote
from lightning_rl.rollout import Rollout, RolloutStatus
from lightning_rl.run.loop.background import run_async


@pytest.fixture
def groups(make_rollout):
    """Return two groups of two; completions "a0", "a1", "b0", "b1"."""
    return [
        [
            make_rollout([3], [4], group_id=g, sample_index=i, completion=f"{g}{i}", reward=None)
            for i in range(2)
        ]
        for g in "ab"
    ]


def grade(groups, *functions, state=None):
    rewards = Rewards(list(functions))
    if state is not None:
        rewards.state = state
    run_async(rewards.grade(groups))
    return [rollout for group in groups for rollout in group]


def digits(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    """Shaped by progress and logging both ways, as in TRL's own example of a reward function."""
    right = [float(text[-1]) for text in completions]
    log_extra("digit", [text[-1] for text in completions])
    log_extra("pair", [np.float64(0.5), {"a": 1}])
    log_metric("right", sum(right) / len(right))
    return [trainer_state.global_step / trainer_state.max_steps * score for score in right]


def test_a_function_gets_progress_and_logs_columns_and_metrics(groups):
    rollouts = grade(groups, digits, state=TrainerState(global_step=3, max_steps=4))
    assert [r.reward for r in rollouts] == [0.0, 0.75, 0.0, 0.75]
    assert [r.extra for r in rollouts] == [
        {"digit": "0", "pair": 0.5},
        {"digit": "1", "pair": {"a": 1}},
    ] * 2
    assert all(type(value) in (str, float, dict) for r in rollouts for value in r.extra.values())
    assert rollouts[0].logged == {"right": 0.5}
    kept = [Rollout.from_dict(json.loads(json.dumps(r.to_dict()))) for r in rollouts]
    assert kept == rollouts
    assert rollout_metrics(rollouts, 1.0, 0)["logged/right"] == 0.5
    assert evaluation_metrics(rollouts, {"": 1.0})["eval/logged/right"] == 0.5
    header, _, first, *_ = as_markdown(*preview_table(rollouts)).splitlines()
    assert header == "| prompt | completion | reward | parts | digit | pair | end |"
    assert "| 0 | 0.5 | completed" in first


def test_numbers_of_one_name_are_averaged_over_functions_and_groups(groups):
    def one(completions, log_metric):
        log_metric("x", 1.0 if completions[0] == "a0" else 5.0)
        log_metric("none", math.nan)
        return [1.0, 1.0]

    def two(completions, log_metric):
        log_metric("x", 3)
        log_metric("x", math.nan)
        return [1.0, 1.0]

    rollouts = grade(groups, one, two)
    assert [r.logged["x"] for r in rollouts] == [2.0, 2.0, 4.0, 4.0]
    metrics = rollout_metrics(rollouts, 1.0, 0)
    assert metrics["logged/x"] == 3.0
    assert math.isnan(metrics["logged/none"])


def test_a_column_of_the_data_does_not_take_the_place_of_the_log(make_rollout):
    rollout = make_rollout([3], [4], reward=None, columns={"log_metric": "text"})

    def scores(completions, log_metric):
        log_metric("x", 1)
        return [1.0]

    assert grade([[rollout]], scores)[0].logged == {"x": 1.0}


def test_a_column_that_does_not_fit_the_completions_fails_its_group(groups):
    def scores(completions, log_extra):
        log_extra("half", ["x"] if completions[0] == "a0" else ["x", "y"])
        return [1.0, 1.0]

    rollouts = grade(groups, scores)
    assert [r.status for r in rollouts] == [RolloutStatus.FAILED] * 2 + [
        RolloutStatus.COMPLETED
    ] * 2
    assert "log_extra('half') was given 1 values for 2 completions" in rollouts[0].error
    assert rollouts[3].extra == {"half": "y"}


def test_remote_rewards_log_too_and_forget_attempts_that_failed(groups):
    failed = []

    async def judged(completions, trainer_state, log_extra, log_metric):
        log_extra("step", [trainer_state.global_step])
        log_metric("length", float(completions[0][-1]))
        await asyncio.sleep(0)
        if completions == ["b1"] and not failed:
            failed.append(True)
            raise OSError("gone")
        if completions == ["a0"]:
            log_extra("only_first", [True])
        return [1.0]

    remote = Remote(judged, retries=1, first_wait_s=0.0)
    rollouts = grade(groups, remote, state=TrainerState(7))
    assert failed
    assert [r.extra for r in rollouts] == [
        {"step": 7, "only_first": True},
        {"step": 7, "only_first": None},
        {"step": 7},
        {"step": 7},
    ]
    assert [r.logged for r in rollouts] == [{"length": 0.5}] * 4
