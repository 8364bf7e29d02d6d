"""Test a shortened recipes/openenv_guess with the real package, and a rerun of one of its games.

Slow: a training and a rerun, each with a server that imports OpenEnv.
"""

import json
import shutil
from pathlib import Path

import pytest

from lightning_rl.cli import main
from recipes.guess_digit.prepare import prepare

ROOT = Path(__file__).parents[3]
MADE = ROOT / "build" / "openenv"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MADE / "made").exists(), reason="`make openenv` makes the environment"),
]


def test_a_small_model_plays_at_a_server_and_a_game_is_played_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "openenv").symlink_to(MADE, target_is_directory=True)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    prepare(Path("runs/guess_digit"))
    two = ["--model.model", "runs/guess_digit/model", "--data.engine", "TransformersEngine"]
    two += ["--data.groups_per_iteration", "4", "--data.iterations_per_epoch", "2"]
    two += ["--data.evaluation.samples", "1"]
    assert main(["fit", "--config", "recipes/openenv_guess/grpo.yaml", *two]) == 0
    run = tmp_path / "runs/openenv_guess/grpo/version_0"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    assert summary["metrics"]["rollout/completed"] == 4 * 16
    games = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    for game in games:
        # What a game paid follows from its text and its seed alone.
        digit = str(game["prompt"]["columns"]["reset"]["seed"])
        assert game["reward"] == float(game["completion"].endswith(digit))
    capsys.readouterr()
    assert main(["rerun", str(run), "--rollout", games[-1]["id"]]) == 0
    assert "equal" in capsys.readouterr().out
