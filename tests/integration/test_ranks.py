"""Processes that stay alive run each function as if alone, and are ended when one of them fails."""

import pytest

from tests.support.ranks_faults import changed_state, raised_on_rank_one

pytestmark = pytest.mark.slow


def test_a_function_that_fails_on_one_rank_ends_all_and_the_next_gets_new_ones(together):
    with pytest.raises(AssertionError, match="rank 1 failed") as caught:
        together(2, raised_on_rank_one)
    assert "RuntimeError: rank 1 has had enough" in str(caught.value)
    assert len(together(2, changed_state)) == 2


def test_nothing_is_left_of_what_a_function_changed(together):
    first, second = together(2, changed_state, 1), together(2, changed_state, 2)
    assert first == second
