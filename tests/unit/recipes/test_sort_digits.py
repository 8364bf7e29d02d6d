"""Test the commands that recipes/sort_digits.quickstart runs, and the search over settings."""

import sys

import pytest

from recipes.sort_digits import quickstart, sweep


@pytest.mark.parametrize(
    ("installed", "engine"), [(True, []), (False, ["--data.engine", "TransformersEngine"])]
)
def test_vllm_generates_where_it_is_installed(tmp_path, monkeypatch, installed, engine):
    """The engine runs as grpo.yaml says, in one process."""
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "run", lambda *command: commands.append(list(command)))
    monkeypatch.setattr(quickstart, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(quickstart, "newest_run", lambda directory: directory)
    monkeypatch.setattr(quickstart, "report", lambda directory, seconds: 0.9)
    assert quickstart.main(["--iterations", "2"]) == 0
    fit = ["lightning_rl", "fit", "--config"]
    assert commands == [
        ["recipes.sort_digits.prepare", "--out", "runs/sort_digits"],
        [*fit, "recipes/sort_digits/sft.yaml"],
        [*fit, "recipes/sort_digits/grpo.yaml", "--data.iterations_per_epoch", "2", *engine],
    ]


def test_a_search_without_optuna_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)  # whether it is installed or not
    monkeypatch.setattr(sys, "argv", ["sweep"])
    with pytest.raises(SystemExit, match="pip install optuna"):
        sweep.main()
    assert not list(tmp_path.iterdir())
