"""Prefixes: the row that is found is the one that comparing with all of them finds."""

from hypothesis import given, settings, strategies as st

from lightning_rl.agents import prefixes
from lightning_rl.agents.prefixes import Prefixes, begins
from lightning_rl.rollout import Row, SamplingDistribution

KINDS = [("", None), ("critic", None), ("", SamplingDistribution(temperature=0.5))]
TOKENS = st.lists(st.integers(0, 1), max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), TOKENS, TOKENS), min_size=1, max_size=25)


def compared(rows: list[Row], prompt: list[int], kind, fits) -> int | None:
    """Of all rows of the kind that fit, the longest; of equal ones the first."""
    fitting = [p for p, row in enumerate(rows) if (row.role, row.sampling) == kind and fits(row)]
    return max(fitting, key=lambda place: rows[place].length, default=None)


def play(steps, taken) -> None:
    """Prompts continue rows or begin some, as calls do; with each, both ways of finding agree."""
    rows: list[Row] = []
    found = Prefixes(rows)
    for (role, sampling), prompt, wrote in steps:

        def fits(row, prompt=prompt):
            return taken(row, prompt) and begins(prompt, row)

        place = found.longest(prompt, role, sampling, fits)
        assert place == compared(rows, prompt, (role, sampling), fits)
        if place is None:
            place = len(rows)
            rows.append(Row(prompt, role=role, sampling=sampling))
        rows[place].append_given(prompt[rows[place].length :])
        rows[place].append_written(wrote, [0.0] * len(wrote), [0] * len(wrote))
        found.grown(place)
    anew = Prefixes(rows)  # of a first row without tokens it does not know
    for (role, sampling), prompt, _ in steps:
        ways = [one.longest(prompt, role, sampling, lambda r: bool(r.token_ids)) for one in
                (found, anew)]  # fmt: skip
        assert ways[0] == ways[1]


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
    base, prefixes._BASE = prefixes._BASE, prefixes.np.uint64(1)  # so order does not count
    try:
        play(steps, lambda row, prompt: True)
    finally:
        prefixes._BASE = base


def test_a_token_that_is_0_is_a_token():
    rows = [Row([5]), Row([5, 0])]
    for row in rows:
        row.append_written([7], [0.0], [0])
    found = Prefixes(rows)
    for prompt, place in (([5, 7, 0], 0), ([5, 0, 7], 1), ([5, 0, 0], None), ([0, 5, 7], None)):
        assert found.longest(prompt, "", None, lambda row, p=prompt: begins(p, row)) == place
