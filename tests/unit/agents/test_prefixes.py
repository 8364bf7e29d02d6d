"""Test prefixes: the row that is found is the one that comparing with all of them finds."""

from hypothesis import given, settings, strategies as st

from lightning_rl.agents.prefixes import Prefixes, begins
from lightning_rl.engines import prefix_cache
from lightning_rl.rollout import Row, SamplingDistribution

KINDS = [("", None), ("critic", None), ("", SamplingDistribution(temperature=0.5))]
TOKENS = st.lists(st.integers(0, 1), max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), TOKENS, TOKENS), min_size=1, max_size=25)


def compared(rows: list[Row], prompt: list[int], kind, may) -> int | None:
    """Return the longest of all rows of the kind that fit; of equal ones the first."""
    fitting = [
        place
        for place, row in enumerate(rows)
        if (row.role, row.sampling) == kind and may(row) and begins(prompt, row)
    ]
    return max(fitting, key=lambda place: rows[place].length, default=None)


def play(steps, taken) -> None:
    """Play prompts that continue rows or begin some, and require that both ways agree on each."""
    rows: list[Row] = []
    found = Prefixes(rows)
    for (role, sampling), prompt, wrote in steps:

        def may(row, prompt=prompt):
            return taken(row, prompt)

        place = found.longest(prompt, role, sampling, may)
        assert place == compared(rows, prompt, (role, sampling), may)
        assert Prefixes([Row([9]), *rows]).longest(prompt, role, sampling, may) == (
            None if place is None else place + 1
        )
        if place is None:
            place = len(rows)
            rows.append(Row(prompt, role=role, sampling=sampling))
        rows[place].append_given(prompt[rows[place].length :])
        rows[place].append_written(wrote, [0.0] * len(wrote), [0] * len(wrote))
        found.grown(place)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_it_finds_what_comparing_with_all_rows_finds(steps):
    play(steps, lambda row, prompt: True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_rows_that_are_refused_are_passed_over(steps):
    play(steps, lambda row, prompt: row.length < len(prompt) or not row.token_ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_equal_hashes_of_other_tokens_are_told_apart(steps):
    # So order does not count.
    base, prefix_cache._BASE = prefix_cache._BASE, prefix_cache.np.uint64(1)
    try:
        play(steps, lambda row, prompt: True)
    finally:
        prefix_cache._BASE = base


def test_a_token_that_is_0_is_a_token():
    rows = [Row([5]), Row([5, 0])]
    for row in rows:
        row.append_written([7], [0.0], [0])
    found = Prefixes(rows)
    for prompt, place in (([5, 7, 0], 0), ([5, 0, 7], 1), ([5, 0, 0], None), ([0, 5, 7], None)):
        assert found.longest(prompt, "", None) == place
