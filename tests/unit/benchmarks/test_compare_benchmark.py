"""benchmarks.compare simulates runs whose accuracies and effects are those that it says."""

import numpy as np
import pytest

from benchmarks.compare import KINDS, PAIRS, chances, differences, pairs_until_decided


@pytest.mark.parametrize("accuracy", [0.1, 0.6, 0.95])
def test_chances_have_the_accuracy_as_their_mean(accuracy):
    """Between the shifts of a table, whose steps are 0.01, the mean is nearly a straight line."""
    assert chances(accuracy).mean() == pytest.approx(accuracy, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_own_parts_have_mean_zero(kind):
    """Means of 4,000 draws with a deviation of at most 2, within five standard errors."""
    random = np.random.default_rng(0)
    drawn = np.array([kind(random) for _ in range(4000)])
    assert np.abs(drawn.mean(0)).max() < 5 * 2 / 4000**0.5


def test_a_large_effect_is_decided_and_a_small_number_of_pairs_is_not():
    found = differences(KINDS[0], 0.3, np.random.default_rng(0))
    assert len(found) == PAIRS
    assert 4 <= pairs_until_decided(found) <= PAIRS
    assert pairs_until_decided(found[:3]) is None
