"""Test the versions that were tried together: the nearest row, and the table of them."""

from pathlib import Path

import pytest

from benchmarks.versions import PAGE, noted, table
from lightning_rl.cli.check.tried_versions import (
    Versions,
    check_tried,
    nearest,
    public,
    read_tried,
)

ROWS = [
    Versions("cuda", "2.11.0", "0.26.0", "5.17.0", ("gpu-check",), "2026-11-26"),
    Versions("cpu", "2.12.0", "0.32.0", "5.16.0", ("units",), "2026-11-27"),
    Versions("cpu", "2.13.0", "0.32.0", "5.17.0", ("units", "engines"), "2026-11-28"),
]


@pytest.mark.parametrize(
    ("here", "row"),
    [
        (("cpu", "2.13.0", "0.32.0", "5.17.0"), 2),
        (("cpu", "2.12.0", "0.31.0", "5.16.0"), 1),
        (("cpu", "2.9.0", "", "5.1.0"), 2),  # nothing is equal: the newest
        (("cuda", "2.13.0", "0.32.0", "5.18.0"), 0),  # the device comes first
    ],
)
def test_the_nearest_row_shares_the_device_and_most_versions(here, row):
    assert nearest(Versions(*here), ROWS) == ROWS[row]


def test_what_was_tried_is_told_and_what_was_not_is_a_warning():
    tried = check_tried(Versions("cpu", "2.13.0", "0.32.0", "5.17.0"), ROWS)
    assert tried.problem is None
    assert tried.value == "tried together: units, engines on cpu, 2026-11-28"
    untried = check_tried(Versions("cpu", "2.13.0", "0.32.0", "5.99.0"), ROWS)
    assert untried.problem == "not tried together yet"
    assert not untried.serious
    assert "torch 2.13.0, vLLM 0.32.0, transformers 5.17.0 (units, engines on cpu" in untried.fix


def test_a_row_keeps_what_was_run_before_and_moves_to_the_end():
    rows = noted(ROWS, Versions("cpu", "2.12.0", "0.32.0", "5.16.0"), "engines", "2026-11-30")
    assert rows[:-1] == [ROWS[0], ROWS[2]]
    assert (rows[-1].ran, rows[-1].date) == (("units", "engines"), "2026-11-30")
    assert noted(rows, rows[-1], "units", "2026-12-01")[-1].ran == ("units", "engines")


def test_a_version_has_no_local_part():
    assert public("2.13.0+cpu") == "2.13.0"
    assert public(None) == ""


def test_the_page_shows_the_rows():
    shown = PAGE.read_text().partition("<!-- versions -->\n")[2].partition("\n<!-- /")[0]
    assert shown.splitlines() == table(read_tried())
    assert Path("setup.cfg").read_text().count("lightning_rl.cli.check = *.jsonl") == 1
