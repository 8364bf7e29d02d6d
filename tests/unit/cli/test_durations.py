"""Test durations on a command line, and as people read them."""

import pytest

from lightning_rl.cli.process import duration, parse_duration
from lightning_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("20m", 1200), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("0.5h", 1800)],
)
def test_a_duration_has_units(text, seconds):
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize(
    "text", ["", "2", "h", "2 h", "-1h", "0s", "2hours", "1e3s", "9" * 400 + "s"]
)
def test_another_text_is_refused_with_its_option(text):
    with pytest.raises(ConfigError, match=r"--budget=.* must be a duration above 0"):
        parse_duration(text, "--budget")


def test_a_duration_is_rounded_for_people():
    assert [duration(s) for s in (3.4, 119, 120, 7100, 9000)] == [
        "3 s", "119 s", "2 min", "118 min", "2.5 h"
    ]  # fmt: skip
