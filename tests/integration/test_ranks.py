"""Processes that stay alive run each function as if alone, and are ended when one of them fails."""

import pytest

from tests.support.ranks_faults import changed_state, raised_on_rank_one
from tests.support.ranks_lacking import LACKING, metrics_by_two, objective_metrics

pytestmark = pytest.mark.slow


def test_a_function_that_fails_on_one_rank_ends_all_and_the_next_gets_new_ones(together):
    with pytest.raises(AssertionError, match="rank 1 failed") as caught:
        together(2, raised_on_rank_one)
    assert "RuntimeError: rank 1 has had enough" in str(caught.value)
    assert len(together(2, changed_state)) == 2


def test_nothing_is_left_of_what_a_function_changed(together):
    first, second = together(2, changed_state, 1), together(2, changed_state, 2)
    assert first == second


@pytest.mark.parametrize("lacks", LACKING)
def test_a_rank_that_lacks_something_measures_with_the_others(together, random_batch, lacks):
    """Each advantage and objective, of two ranks: metrics are those of both batches together."""
    batches = [random_batch(5), random_batch(6)]
    one, other = together(2, metrics_by_two, batches, lacks)
    assert one == other
    whole = objective_metrics(batches, lacks, [0, 1])
    assert one.keys() == whole.keys()
    for name, expected in whole.items():
        assert one[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
