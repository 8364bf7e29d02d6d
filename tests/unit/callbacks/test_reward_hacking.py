"""Test Gaming: a part of the reward, or accuracy, falls while the reward rises."""

import json

import pytest

from lightning_rl.agents.base import SingleTurn
from lightning_rl.callbacks.reward_hacking import RewardHacking, component_weights
from lightning_rl.callbacks.samples import FirstAndLast, Sample
from lightning_rl.collect.tasks import Task
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.sampling import Sampling
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.teachers import ModelTeacher

GROUPS = 16
RIGHT, FORM = "right", "form"


@pytest.fixture
def play(make_rollout):
    """Play iterations of 16 groups of one rollout, of which so many are right, and in form."""

    def play(iterations, weights, window=1):
        gaming = RewardHacking(FirstAndLast(window, GROUPS), 4.0, 3.0)
        for right, form in iterations:
            rollouts = []
            for group in range(GROUPS):
                parts = {RIGHT: float(group < right), FORM: float(group < form)}
                reward = sum(weights[name] * score for name, score in parts.items())
                fields = {"group_id": str(group), "reward": reward, "reward_parts": parts}
                rollouts.append(make_rollout([3], [4, 1], **fields))
            gaming.rewards.add([rollout.reward for rollout in rollouts])
            gaming.add(rollouts)
        return gaming

    return play


@pytest.mark.parametrize(
    ("weights", "ends", "falls"),
    [
        # From 12 of 16 to 1: 0.75 -> 0.0625, standard errors 0.108 and 0.061, 4 of them 0.50.
        ({RIGHT: 1.0, FORM: 1.0}, [(12, 0), (1, 16)], True),
        ({RIGHT: 0.0, FORM: 1.0}, [(12, 0), (1, 16)], True),  # only watched
        ({RIGHT: 0.5, FORM: 1.0}, [(12, 0), (1, 12)], False),  # form is what matters most
        ({RIGHT: 0.5, FORM: 1.0}, [(12, 0), (1, 16)], True),  # but it has no more to pay
        ({RIGHT: 0.5, FORM: 1.0}, [(16, 0), (9, 16)], False),  # more than half is left
        ({RIGHT: 1.0, FORM: 1.0}, [(12, 0), (8, 16)], False),  # 0.5 may be chance
        ({RIGHT: 1.0, FORM: 0.5}, [(12, 0), (1, 16)], False),  # all of the reward fell
        ({RIGHT: 1.0, FORM: -1.0}, [(1, 0), (12, 16)], False),  # the price of the form rose
        ({RIGHT: 0.0, FORM: 1.0}, [(1, 0), (12, 8), (1, 16)], True),  # back to where it began
        ({RIGHT: 0.0, FORM: 1.0}, [(1, 0), (12, 8), (1, 6)], False),  # both fell from their peak
    ],
)
def test_a_part_falls_from_its_peak_while_the_reward_does_not(play, weights, ends, falls):
    gaming = play(ends, weights)
    said = gaming.part_fell(weights)
    assert (said is not None) == falls
    if falls:
        assert said.startswith("the reward right went from 0.75 to 0.0625, while the mean of all")
    assert gaming.part_fell({"other": 1.0, "names": 1.0}) is None


def test_a_peak_among_many_has_to_be_further_above(play):
    weights = {RIGHT: 0.0, FORM: 1.0}
    # From 12 to 3 of 16: 0.5625, standard errors 0.108 and 0.0976; 4 of them 0.583, 3.5 0.51.
    few = play([(8, 0), (12, 8), (3, 9)], weights)
    assert few.part_fell(weights) is None
    few.reward_sigmas = 3.5  # and sqrt(12.25 + 4 log 2) = 3.88 for two windows: 0.566
    assert few.part_fell(weights) is None
    few.reward_sigmas = 3.4  # 3.78: 0.551
    assert few.part_fell(weights) is not None
    many = play([(8, 0), (8, 4), (8, 6), (12, 8), (3, 9)], weights)
    many.reward_sigmas = 3.4  # sqrt(11.56 + 4 log 4) = 4.14: 0.603
    assert many.part_fell(weights) is None


def test_accuracy_below_its_best_counts_where_the_reward_rose(play):
    weights = {RIGHT: 0.0, FORM: 1.0}

    def said(rewards, accuracies, prompts=96):
        gaming = play([(0, rewards[0])], weights)
        found = []
        for accuracy, form in zip(accuracies, rewards, strict=True):
            found.append(gaming.accuracy_fell(Sample.of_share(accuracy, prompts)))
            gaming.rewards.add([float(group < form) for group in range(GROUPS)])
        return found

    # 3 standard errors of 0.3 and 0.07 on 96 prompts: 3 sqrt(0.21 / 96 + 0.0651 / 96) = 0.161.
    *none, found = said([2, 5, 9, 9], [0.2, 0.3, 0.3, 0.07])
    assert none == [None, None, None]
    assert found.startswith(
        "eval/accuracy of 96 prompts fell from 0.3 to 0.07, while the mean reward rose from 0.312 "
        "to 0.562."
    )
    assert said([2, 5, 9, 9], [0.2, 0.3, 0.3, 0.15]) == [None] * 4  # may be chance
    assert said([9, 5, 2, 2], [0.2, 0.3, 0.3, 0.07]) == [None] * 4  # the reward fell, too
    assert said([2, 5, 9, 9], [0.2, 0.3, 0.3, 0.07], prompts=24) == [None] * 4


def test_it_goes_on_where_its_state_was_taken(play):
    weights = {RIGHT: 1.0, FORM: 1.0}
    before = play([(12, 0), (1, 16)], weights)
    before.accuracy_fell(Sample.of_share(0.5, 96))
    after = RewardHacking(before.rewards, 4.0, 3.0)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    assert after.part_fell(weights) == before.part_fell(weights) is not None


def test_a_teacher_is_no_part_that_is_watched(tiny_model):
    def right(completions, **_):
        return [1.0 for _ in completions]

    rewards = Rewards([right, ModelTeacher(str(tiny_model))], [1.0, 0.0])
    task = Task("", IterablePrompts([]), SingleTurn(), rewards, Sampling(), 4, 1.0)
    assert component_weights(task) == {"right": 1.0}
