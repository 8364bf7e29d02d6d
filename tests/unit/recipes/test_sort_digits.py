"""Test the commands that recipes/sort_digits.quickstart runs."""

import pytest

from recipes.sort_digits import quickstart


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
