"""Test rewards of several numbers per completion: what is learned from, and what is kept."""

import json
import math
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
import torch

from lightning_rl.collect.stats import rollout_metrics
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.parts import parts_of
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rollout import Rollout, RolloutStatus
from lightning_rl.run.loop.background import run_async


@pytest.mark.parametrize(
    ("score", "parts"),
    [
        (0.5, {"f": 0.5}),
        (None, {"f": None}),
        (True, {"f": 1.0}),
        ({"right": 1, "brief": 0.25}, {"f": 1.25, "f/right": 1.0, "f/brief": 0.25}),
        ([1, 0.25, None], {"f": 1.25, "f/0": 1.0, "f/1": 0.25, "f/2": None}),
        ((0.5,), {"f": 0.5, "f/0": 0.5}),
        # verl has it so: one is the score, the others are told beside it.
        ({"score": -1, "acc": True}, {"f": -1.0, "f/score": -1.0, "f/acc": 1.0}),
        ({"score": None, "acc": 1}, {"f": None, "f/score": None, "f/acc": 1.0}),
        ({"right": None}, {"f": None, "f/right": None}),
        (np.array([1.0, 0.5]), {"f": 1.5, "f/0": 1.0, "f/1": 0.5}),
        (np.float32(0.5), {"f": 0.5}),
        (torch.tensor([0.5]), {"f": 0.5, "f/0": 0.5}),
        (torch.tensor(0.5), {"f": 0.5}),
        (MappingProxyType({"a": np.int64(2)}), {"f": 2.0, "f/a": 2.0}),
        (OrderedDict(a=torch.tensor(2)), {"f": 2.0, "f/a": 2.0}),
    ],
)
def test_a_score_is_a_number_and_what_it_consists_of(score, parts):
    found = parts_of("f", score)
    assert found == parts
    assert all(type(number) in (float, type(None)) for number in found.values())


@pytest.mark.parametrize(
    ("score", "says"),
    [
        ({}, r"returned {}; a list or mapping must have at least one score"),
        ([], r"returned \[\]; a list or mapping must have at least one score"),
        ({"right": "yes"}, r"returned {'right': 'yes'} \(right\); .*keep texts with log_extra"),
        ({"right": [1]}, "must be a finite number or None"),
        ([[1], [2]], "must be a finite number or None"),
        ({"right": math.nan}, r"\(right: nan\); a score must be a finite number"),
        ([1, math.inf], r"\(1: inf\); a score must be a finite number"),
        ([1, 10**400], "must be a finite number"),
        ({"right": 2e6}, r"\(right: 2000000.0\); a score must be within ±1e6"),
        ([8e5, 8e5], r"\(the sum: 1600000.0\); a score must be within ±1e6"),
        (object(), "must be a finite number or None"),
    ],
)
def test_a_part_that_is_no_number_is_named(score, says):
    with pytest.raises(ValueError, match=says):
        parts_of("f", score)


def graded(scores):
    """Grade two parts and a hint."""
    return [{"right": score, "form": 0.5} for score in scores]


def plain(scores):
    return list(scores)


@pytest.fixture
def rollouts(make_rollout):
    return [
        make_rollout([3], [4, 1], sample_index=i, columns={"scores": i}, reward=None)
        for i in range(3)
    ]


def test_the_weighted_sum_takes_each_function_once(rollouts):
    def bad(scores):
        return [None, {"x": "text"}, 2]

    rewards = Rewards([graded, bad, plain], weights=[2.0, 10.0, 1.0], max_failed_share=1.0)
    run_async(rewards.grade([rollouts]))
    # 2 * (0 + 0.5) + 0; and 2 * (2 + 0.5) + 10 * 2 + 2
    assert [r.reward for r in rollouts] == [1.0, None, 27.0]
    assert rollouts[1].status is RolloutStatus.FAILED
    assert rollouts[1].error.startswith("reward bad: returned {'x': 'text'}")
    assert rollouts[2].reward_parts == {
        "graded": 2.5, "graded/right": 2.0, "graded/form": 0.5, "bad": 2.0, "plain": 2.0,
    }  # fmt: skip
    metrics = rollout_metrics([rollouts[0], rollouts[2]], 1.0, 0)
    assert metrics["reward/graded"] == 1.5
    assert metrics["reward/graded/right"] == 1.0
    assert metrics["reward/graded/form"] == 0.5


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".sqlite"])
def test_parts_are_kept_in_rollout_files(rollouts, ending, tmp_path):
    run_async(Rewards([graded]).grade([rollouts]))
    file = open_rollouts(tmp_path / f"rollouts{ending}")
    file.append(rollouts, 0)
    file.close()
    read = [recorded.rollout for recorded in open_rollouts(file.path).read()]
    assert read == rollouts
    assert read[1].reward_parts == {"graded": 1.5, "graded/right": 1.0, "graded/form": 0.5}


def test_a_function_in_a_process_of_its_own_may_return_parts(rollouts):
    isolated = Isolated(graded, workers=1)
    try:
        run_async(Rewards([isolated]).grade([rollouts]))
    finally:
        isolated.close()
    assert [r.reward for r in rollouts] == [0.5, 1.5, 2.5]
    assert rollouts[1].reward_parts["graded/form"] == 0.5


def test_what_was_graded_goes_on_from_a_checkpoint_as_it_is(rollouts):
    run_async(Rewards([graded]).grade([rollouts]))
    again = [Rollout.from_dict(json.loads(json.dumps(r.to_dict()))) for r in rollouts]
    run_async(Rewards([graded]).grade([again]))
    assert again == rollouts


def test_a_part_called_reward_beside_others_is_refused():
    with pytest.raises(ValueError, match="rename 'reward' to 'score'"):
        parts_of("f", {"reward": 1, "a": 0.5})
    assert parts_of("f", {"reward": 1}) == {"f": 1.0, "f/reward": 1.0}
    assert parts_of("f", {"score": 1, "reward": 3, "a": 0.5})["f"] == 1.0
