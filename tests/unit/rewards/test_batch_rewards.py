"""Test batch_reward: a reward function that is called once with all completions of a batch."""

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.extend import batch_reward
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rewards.remote import Remote
from lightning_rl.rollout import RolloutStatus


@batch_reward
class Compares:
    def __call__(self, completions):
        return [1.0] * len(completions)


def graded(make_rollout, *rewards, columns=({}, {}), **options):
    groups = [
        [make_rollout([3], [4 + i, 1], group_id=g, columns=c, reward=None) for i in range(2)]
        for g, c in zip("ab", columns, strict=True)
    ]
    made = Rewards(list(rewards), max_failed_share=1.0, **options)
    made.grade_here(groups)
    return [rollout for group in groups for rollout in group]


def test_rows_of_different_kinds_get_none_where_a_column_is_missing(make_rollout):
    seen = []

    @batch_reward
    def compares(completions, answer, unit):
        seen.append((answer, unit))
        return [1.0] * len(completions)

    graded(make_rollout, compares, columns=[{"answer": 1}, {"answer": 2, "unit": "m"}])
    assert seen == [([1, 1, 2, 2], [None, None, "m", "m"])]


def test_an_async_one_and_what_failed_before_it(make_rollout):
    seen = []

    def fails_a(completion_ids, group_ids):
        if group_ids[0] == "a":
            raise ValueError("no")
        return [0.5] * len(completion_ids)

    @batch_reward
    async def later(group_ids):
        seen.append(group_ids)
        return [2.0] * len(group_ids)

    rollouts = graded(make_rollout, later, fails_a)
    assert seen == [["b", "b"]]
    assert [r.reward for r in rollouts] == [None, None, 2.5, 2.5]


def test_one_that_raises_fails_the_whole_batch(make_rollout):
    @batch_reward
    def broken(completions):
        raise KeyError("ranks")

    rollouts = graded(make_rollout, broken)
    assert {r.status for r in rollouts} == {RolloutStatus.FAILED}
    assert rollouts[0].error.startswith(
        "reward broken: KeyError: 'ranks', at rewards/test_batch_rewards.py:"
    )


@pytest.mark.parametrize("wrapper", [Isolated, Remote])
def test_it_cannot_be_graded_one_by_one(wrapper):
    with pytest.raises(ConfigError, match="Compares is a batch_reward, but"):
        wrapper(Compares())
