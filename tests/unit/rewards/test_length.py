"""Test LengthReward by hand: what is paid, and what is never."""

import asyncio

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import batch_reward
from lightning_rl.rewards.comparing import share_beaten
from lightning_rl.rewards.length import LengthReward, LinearLength, RankedLength
from lightning_rl.rollout import Call, RolloutStatus, Row


def right(completions):
    return [float(text == "right") for text in completions]


def graded(group, *functions, **options):
    asyncio.run(Rewards(list(functions), **options).grade([group]))
    return [r.reward_parts.get("length") for r in group]


@pytest.fixture
def group(make_rollout):
    """Return right completions of 2, 4, 4 and 8 tokens, and a wrong one of 1."""
    said = [("right", 2), ("right", 4), ("wrong", 1), ("right", 8), ("right", 4)]
    return [
        make_rollout([3], [5] * length, sample_index=i, completion=text, reward=None)
        for i, (text, length) in enumerate(said)
    ]


def test_right_answers_are_ranked_among_each_other(group):
    # Of three other right ones: 2 tokens beat 3; 4 tokens beat one and tie with one; 8 beat none.
    found = graded(group, right, LengthReward(RankedLength(), only_if="right"))
    assert found == [1.0, 0.5, 0.0, 0.0, 0.5]


def test_linear_lengths_are_paid_between_two_bounds(group):
    # (8 - 2)/(8 - 0) = 0.75, (8 - 4)/8 = 0.5, and 8 is the longest
    scale = LinearLength(longest=8)
    assert graded(group, right, LengthReward(scale, only_if="right")) == [0.75, 0.5, 0, 0, 0.5]
    # All up to 4; 6 is half way to 8, and 9 is beyond.
    assert LinearLength(longest=8, shortest=4)([1, 4, 6, 8, 9]) == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_without_a_condition_a_wrong_answer_is_paid_too(group):
    assert graded(group, right, LengthReward(LinearLength(longest=8))) == [
        0.75, 0.5, 0.875, 0.0, 0.5
    ]  # fmt: skip


def test_a_part_of_a_reward_may_be_the_condition(group):
    def several(completions):
        return [{"short": 1.0, "right": 0.5 * (text == "right")} for text in completions]

    reward = LengthReward(RankedLength(), only_if="several/right", at_least=0.5)
    assert graded(group, several, reward) == [1.0, 0.5, 0.0, 0.0, 0.5]


def test_where_the_other_reward_does_not_apply_nothing_is_paid(group):
    def some(completions):
        return [None, *right(completions[1:])]

    # Of two other right ones 4 tokens beat one and tie with one; 8 beat none.
    found = graded(group, some, LengthReward(RankedLength(), only_if="some"))
    assert found == [0.0, 0.75, 0.0, 0.0, 0.75]


def test_a_lone_right_answer_gets_half_however_long(group):
    group[0].completion = group[1].completion = group[4].completion = "wrong"
    found = graded(group, right, LengthReward(RankedLength(), only_if="right"))
    assert found == [0.0, 0.0, 0.0, 0.5, 0.0]


def test_the_share_beaten_is_the_mean_rank_of_ties():
    # Ranks 1, 2.5, 2.5, 4 of n = 4: (4 - rank)/3
    assert share_beaten([10, 20, 20, 30]) == [1.0, 0.5, 0.5, 0.0]
    assert share_beaten([7, 7, 7]) == [0.5, 0.5, 0.5]
    assert share_beaten([2, 1]) == [0.0, 1.0]
    assert share_beaten([4]) == [0.5]
    assert share_beaten([]) == []


@pytest.mark.parametrize(("of", "length"), [("tokens", 7), ("turns", 2), ("context", 9)])
def test_a_rollout_of_several_turns_has_three_lengths(make_rollout, of, length):
    rollout = make_rollout([3, 3, 3], [])
    # Two calls write 2 and 3 tokens; a tool's result of 1 token stands between them.
    rollout.rows = [Row([3, 3, 3], [5, 5, 6, 5, 5, 5], [True, True, False, True, True, True])]
    rollout.calls = [Call(0, 0, 2), Call(0, 3, 6)]
    rollout.dropped = 2  # of a thought that the template removed
    # At 10 the scale pays a tenth less for each unit of length.
    scores = LengthReward(LinearLength(longest=10), of=of)(rollouts=[rollout])
    assert scores == [pytest.approx(1 - length / 10)]


def test_a_reward_that_comes_later_cannot_be_read():
    reward = LengthReward(RankedLength(), only_if="right")
    with pytest.raises(ConfigError, match=r"reads the score of 'right', but .* before it are none"):
        Rewards([reward, right])
    with pytest.raises(ConfigError, match="before it are short; name one of these"):
        Rewards([_named("short"), reward])
    with pytest.raises(ConfigError, match="rewards of a whole batch come after"):
        Rewards([batch_reward(_named("right")), reward])


def _named(name):
    def reward(completions):
        return [0.0] * len(completions)

    reward.__name__ = name
    return reward


def test_a_part_that_is_not_there_fails_with_the_names_that_are(group):
    graded(group, right, LengthReward(RankedLength(), only_if="right/exactly"))
    assert {r.status for r in group} == {RolloutStatus.FAILED}
    told = "reward length: only_if='right/exactly' is no score of the completion, which has right;"
    assert all(r.error.startswith(told) for r in group)


def test_impossible_bounds_are_refused():
    with pytest.raises(ConfigError, match=r"longest=4, shortest=4\): need 0 <= shortest < longest"):
        LinearLength(longest=4, shortest=4)
    with pytest.raises(ConfigError, match="at_least=nan must be finite"):
        LengthReward(RankedLength(), at_least=float("nan"))


def test_scales_are_named_as_in_a_configuration():
    reward = LengthReward("RankedLength", only_if="right")
    assert isinstance(reward.scale, RankedLength)
    with pytest.raises(ConfigError, match="of"):
        LengthReward("RankedLength", of="words")
