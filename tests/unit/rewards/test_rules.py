"""Test ready-made rewards by hand."""

import asyncio

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.rules import OverlongPenalty


def test_the_overlong_penalty():
    penalty = OverlongPenalty(max_tokens=10, buffer=4)
    # None up to 6 tokens, -1/4 for each more, -1 from 10 on
    lengths = [1, 6, 7, 8, 9, 10, 11, 50]
    ids = [[3] * n for n in lengths]
    assert penalty(completion_ids=ids) == pytest.approx([0, 0, -0.25, -0.5, -0.75, -1, -1, -1])


def test_the_overlong_penalty_in_float64():
    """Yu et al. 2025, eq. 13, as three cases."""

    def paper(length, longest, cache):
        if length <= longest - cache:
            return 0.0
        if length <= longest:
            return ((longest - cache) - length) / cache
        return -1.0

    for longest, cache in ((16, 16), (20, 1), (37, 11)):
        ids = [[0] * n for n in range(60)]
        expected = [paper(n, longest, cache) for n in range(60)]
        assert OverlongPenalty(longest, cache)(ids) == pytest.approx(expected, abs=1e-15)


def test_it_adds_to_another_reward(make_rollout):
    def right(completions):
        return [1.0] * len(completions)

    rewards = Rewards([right, OverlongPenalty(max_tokens=4, buffer=2)], weights=[1.0, 0.5])
    group = [make_rollout([3], [4] * n, reward=None) for n in (2, 3, 4)]
    asyncio.run(rewards.grade([group]))
    assert [r.reward for r in group] == [1.0, 0.75, 0.5]
    assert [r.reward_parts["overlong"] for r in group] == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(("max_tokens", "buffer"), [(10, 0), (10, 11), (0, 0), (10, -1)])
def test_impossible_buffers_are_refused(max_tokens, buffer):
    with pytest.raises(ConfigError, match=rf"max_tokens={max_tokens}, buffer={buffer}\): need 0 <"):
        OverlongPenalty(max_tokens, buffer)
