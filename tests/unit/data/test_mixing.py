"""Test mixing strategies by hand: which set the next group is drawn from."""

import json

import numpy as np
import pytest

from lightning_rl.data.mixing import ByPassRate, FixedWeights, RoundRobin
from lightning_rl.errors import ConfigError


def chosen(mixing, weights, count, seed=0):
    drawn, places = [0] * len(weights), []
    for _ in range(count):
        places.append(mixing.choose(weights, drawn, seed))
        drawn[places[-1]] += 1
    return places


def test_fixed_weights_compare_one_random_number_per_draw_with_the_shares():
    # Of weights 1, 2 and 1, [0, 1/4) is the first set, [1/4, 3/4) the second, the rest the third.
    numbers = [np.random.default_rng([9, draw, 1]).random() for draw in range(50)]
    expected = [0 if u < 0.25 else 1 if u < 0.75 else 2 for u in numbers]
    assert chosen(FixedWeights(), [1.0, 2.0, 1.0], 50, seed=9) == expected
    assert chosen(FixedWeights(), [0.1, 0.2, 0.1], 50, seed=9) == expected  # only ratios count
    assert chosen(FixedWeights(), [1.0, 2.0, 1.0], 50, seed=8) != expected


def test_fixed_weights_are_kept_in_the_long_run():
    counts = np.bincount(chosen(FixedWeights(), [3.0, 1.0], 4000))
    # Standard deviation: sqrt(4000 x 3/4 x 1/4) = 27.
    assert counts[0] == pytest.approx(3000, abs=4 * 27)


def test_round_robin_is_in_turn_and_never_a_group_off():
    assert chosen(RoundRobin(), [1.0, 1.0, 1.0], 7) == [0, 1, 2, 0, 1, 2, 0]
    # Lags before draw 0: 2/3, 1/3. Draw 1: 4/3 - 1, 2/3. Draw 2: 2 - 1, 1 - 1. Then anew.
    assert chosen(RoundRobin(), [2.0, 1.0], 6) == [0, 1, 0, 0, 1, 0]
    places = chosen(RoundRobin(), [5.0, 3.0, 2.0], 200)
    for count in range(1, 201):
        for place, weight in enumerate((0.5, 0.3, 0.2)):
            assert abs(places[:count].count(place) - weight * count) < 1


def test_by_pass_rate_by_hand():
    mixing = ByPassRate(floor=0.2, memory=0.5)
    assert mixing.shares([1.0, 3.0]) == [0.25, 0.75]  # all are thought to teach something
    # One in two of the first set's groups is mixed, and none of the second's.
    mixing.observe([[[0, 1, 1], [1, 1, 1]], [[0, 0], [1, 1]]], [None, None])
    assert mixing.mixed == [0.75, 0.5]
    # 1 x (0.2 + 0.8 x 0.75) = 0.8, and 3 x (0.2 + 0.8 x 0.5) = 1.8
    assert mixing.shares([1.0, 3.0]) == pytest.approx([0.8 / 2.6, 1.8 / 2.6])
    mixing.observe([[], [[0, 0]]], [None, None])  # nothing of the first set was graded
    assert mixing.mixed == [0.75, 0.25]


def test_no_set_starves():
    mixing = ByPassRate(floor=0.1, memory=0.0)
    mixing.observe([[[0, 0]], [[0, 1]]], [None, None])
    # 0.1 against 1: a tenth of what its weight gives beside a set that teaches.
    assert mixing.shares([1.0, 1.0]) == pytest.approx([0.1 / 1.1, 1 / 1.1])
    assert 0 in chosen(mixing, [1.0, 1.0], 100)


def test_right_is_a_reward_of_at_least_the_bar_of_its_set():
    mixing = ByPassRate(memory=0.0, success_reward=0.5)
    mixing.observe([[[0.4, 0.5]], [[0.4, 0.5]], [[0.4, 0.5]]], [None, 0.4, 0.6])
    assert mixing.mixed == [1.0, 0.0, 0.0]


def test_what_was_learned_is_saved():
    mixing, other = ByPassRate(), ByPassRate()
    mixing.observe([[[0, 1]], [[1, 1]]], [None, None])
    other.load_state_dict(json.loads(json.dumps(mixing.state_dict())))
    assert other.shares([1.0, 1.0]) == mixing.shares([1.0, 1.0]) != [0.5, 0.5]


@pytest.mark.parametrize("options", [{"floor": 0.0}, {"floor": 1.5}, {"memory": 1.0}])
def test_impossible_values_are_refused(options):
    with pytest.raises(ConfigError, match=r"need floor in \(0, 1\] and memory in \[0, 1\)"):
        ByPassRate(**options)
