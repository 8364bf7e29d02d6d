"""Ranges that rewards declare: the bound that follows for their sum, and scores that break one."""

import pytest
from hypothesis import given, settings, strategies as st

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.math_answers import Compare
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rewards.remote import Remote
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, Row


class Constant:
    """Gives each completion the same score, and declares a range."""

    def __init__(self, score, score_range) -> None:
        self.score, self.score_range = score, score_range

    def __call__(self, completions):
        return [self.score] * len(completions)


def graded(scores, ranges, weights) -> tuple[Rollout, float]:
    """Return a rollout with its reward, and the bound."""
    prompt = Prompt("0", "text", [3])
    row, done = Row.of(prompt), RolloutStatus.COMPLETED
    rollout = Rollout(prompt, "0/0/0", 0, seed=1, rows=[row], status=done)
    rewards = Rewards([Constant(*each) for each in zip(scores, ranges, strict=True)], weights)
    rewards.grade_here([[rollout]])
    return rollout, rewards.highest


RANGES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2).map(sorted)
WEIGHTED = st.lists(st.tuples(RANGES, st.floats(-10, 10)), min_size=1, max_size=4)


@settings(deadline=None)
@given(WEIGHTED, st.data())
def test_no_reward_is_above_the_bound_and_one_is_at_it(weighted, data):
    ranges, weights = zip(*weighted, strict=True)
    scores = [data.draw(st.none() | st.floats(*ends)) for ends in ranges]
    rollout, highest = graded(scores, ranges, weights)
    assert (rollout.reward is None) == (set(scores) == {None})
    assert rollout.reward is None or rollout.reward <= highest

    best = [max(ends, key=lambda end: weight * end) for ends, weight in weighted]
    pays = [weight * end for weight, end in zip(weights, best, strict=True)]
    # What costs does not apply; if everything does, what costs least is alone.
    applies = [pay > 0 for pay in pays]
    if not any(applies):
        applies[pays.index(max(pays))] = True
    scores = [end if wanted else None for end, wanted in zip(best, applies, strict=True)]
    assert graded(scores, ranges, weights)[0].reward == highest


@pytest.mark.parametrize("declared", [1, (1, 0), (0, 1, 2), ("a", 1), (0, float("nan")), (0, 2e6)])
def test_a_range_that_is_none_is_refused(declared):
    with pytest.raises(ConfigError, match=r"reward Constant: score_range=.* such as \(0, 1\)"):
        Rewards([Constant(0.0, declared)])


def test_a_score_out_of_its_range_fails_the_rollout():
    rollout, _ = graded([{"score": 1.5, "right": 1.0}], [(0, 1)], [1.0])
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    said = "reward Constant: returned 1.5, out of its score_range (0.0, 1.0); correct either"
    assert rollout.error.startswith(f"{said}; prompt ")


async def awaited(completions):
    return [0.0] * len(completions)


awaited.score_range = (0, 2)


def test_what_wraps_a_function_has_its_range():
    assert Rewards([Remote(awaited)]).highest == 2.0
    assert Rewards([Isolated(Compare("answer"))], [-1.0]).highest == 0.0
    assert Rewards([Isolated(Compare("answer"), fault_score=-1.0)], [-1.0]).highest == 1.0
