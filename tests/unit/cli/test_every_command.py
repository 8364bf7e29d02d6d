"""Every command: its help does nothing else, and an option that it does not know is refused."""

import pytest

from lightning_rl.cli import COMMANDS, main

NAMES = [*COMMANDS, "convert"]
NEEDED = {
    "rollouts": ["rollouts.jsonl"],
    "view": ["runs"],
    "rerun": ["run", "--iteration", "1"],
    "bisect": ["run"],
    "audit": ["run"],
    "pack": ["run", "--iteration", "1"],
    "unpack": ["step.zip"],
    "help": ["PolicyModule"],
    "convert": ["train.py"],
}
"""Arguments without which a command would miss these first."""


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("name", NAMES)
def test_help_is_all_that_is_printed_and_nothing_is_written(name, option, empty, capsys):
    try:
        status = main([name, option])
    except SystemExit as end:  # argparse's own
        status = end.code or 0
    assert status == 0
    assert f"usage: lightning-rl {name}" in capsys.readouterr().out
    assert not list(empty.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_before_anything_is_written(name, empty, capsys):
    assert main([name, *NEEDED.get(name, []), "--no_such_option=1"]) == 2
    said = capsys.readouterr()
    assert "no_such_option" in said.err
    assert not list(empty.iterdir())
