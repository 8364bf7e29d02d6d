"""Test shares with their intervals, votes, and comparisons of two policies, worked out by hand."""

from math import sqrt

import pytest

from lightning_rl.collect.estimates import (
    Comparison,
    maj_at_k,
    mean_by_prompt,
    pass_at_k,
    share_interval,
    sign_test,
)
from lightning_rl.errors import DataError

Z = 1.959963984540054


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # of 6 pairs, 3 hold the right one
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0  # every pair holds one of three
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("answers", "right", "k", "share"),
    [
        ("aab", [1, 1, 0], 3, 1.0),
        ("abb", [1, 0, 0], 3, 0.0),
        ("abc", [1, 0, 0], 3, 1 / 3),  # each has one vote
        ([None, None, "a"], [0, 0, 1], 3, 1.0),  # only one voted
        ([None, None], [0, 0], 2, 0.0),
        ("aabb", [1, 1, 0, 0], 2, 0.5),  # one block right, one wrong
        ("aabba", [1, 1, 0, 0, 1], 2, 0.5),  # the fifth is in no block
        ([1, 1.0, "1"], [1, 0, 0], 2, 0.5),  # "1" and "1.0": answers are compared as text
    ],
)
def test_maj_at_k_by_hand(answers, right, k, share):
    assert maj_at_k(list(answers), list(map(bool, right)), k) == pytest.approx(share)


def wilson(p, n):
    middle, half = p + Z**2 / 2 / n, Z * sqrt(p * (1 - p) / n + Z**2 / 4 / n**2)
    return [(middle - half) / (1 + Z**2 / n), (middle + half) / (1 + Z**2 / n)]


@pytest.mark.parametrize(
    ("totals", "counts", "draws", "p", "n"),
    [
        # One rollout per prompt: Wilson's own. 8 of 10: [0.490, 0.943].
        ([1] * 8 + [0] * 2, [1] * 10, 10, 0.8, 10),
        # Four rollouts of two prompts, alike within each: two samples, not eight.
        ([4, 0], [4, 4], 8, 0.5, 2),
        # se² = ((1 - 2)² + (3 - 2)²) / 8² = 1/32, and 1/4 over it is 8.
        ([1, 3], [4, 4], 8, 0.5, 8),
        # Prompts that are all alike: as many samples as there are rollouts, and no more.
        ([2, 2], [4, 4], 8, 0.5, 8),
        # Nothing wrong seen: prompts count, not rollouts.
        ([4, 4, 4], [4, 4, 4], 12, 1.0, 3),
        ([0, 0, 0], [4, 4, 4], 12, 0.0, 3),
        # Of other sizes: p = 3/6, residuals 1 - 0.5 · 2 = 0 twice, and 2 · 0.5 - 1 = 0.
        ([1, 1, 1], [2, 2, 2], 6, 0.5, 6),
    ],
)
def test_intervals_by_hand(totals, counts, draws, p, n):
    low, high = share_interval(totals, counts, draws)
    assert [low, high] == pytest.approx(wilson(p, n), abs=1e-12)
    assert 0 <= low <= p <= high <= 1


def test_an_interval_holds_the_truth_as_often_as_it_says():
    """Wilson's interval covers 97.9 % over all 2^10 outcomes of 10 prompts with p = 0.5."""
    held = 0
    for outcome in range(2**10):
        right = [outcome >> place & 1 for place in range(10)]
        low, high = share_interval(right, [1] * 10, 10)
        held += low <= 0.5 <= high
    # Outside are 0, 1, 9 and 10 right: 2 (1 + 10) of 1024.
    assert held == 1024 - 22


def test_prompts_have_the_mean_of_their_rollouts():
    assert mean_by_prompt([("a", 1.0), ("b", 2.0), ("a", 0.0)]) == {"a": 0.5, "b": 2.0}


def test_a_comparison_by_hand():
    before = {"a": 0.0, "b": 0.5, "c": 1.0, "d": 0.0, "only": 1.0}
    after = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.0, "new": 0.0}
    found = Comparison.of(before, after)
    # Differences 1, .5, -.5, 0: mean .25; squares .5625 + .0625 + .5625 + .0625 = 1.25.
    error = Z * sqrt(1.25 / 3 / 4)
    assert (found.before, found.after, found.difference) == (0.375, 0.625, 0.25)
    assert (found.low, found.high) == pytest.approx((0.25 - error, 0.25 + error))
    assert (found.prompts, found.won, found.lost) == (4, 2, 1)
    assert found.p_value == 1.0  # 2 (1 + 3) / 8
    assert str(found) == (
        "0.375 → 0.625, +0.25 [-0.383, +0.883]; 2 of 4 prompts won, 1 lost, sign test p = 1"
    )


def test_a_sign_test_by_hand():
    assert sign_test(0, 0) == 1.0
    assert sign_test(6, 0) == sign_test(0, 6) == 2 / 64
    assert sign_test(9, 1) == 2 * 11 / 1024
    assert sign_test(2000, 1000) < 1e-60  # without an overflow


def test_a_comparison_needs_prompts_that_both_have():
    with pytest.raises(DataError, match=r"they share 1 \(2 and 1\); use rollouts of the same"):
        Comparison.of({"a": 1.0, "b": 0.0}, {"a": 0.0})
