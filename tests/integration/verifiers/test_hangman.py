"""Test a shortened recipes/hangman: a real package of verifiers, real vLLM, and a small model.

Slow: vLLM starts for the recipe, and chats of several turns are trained on.
"""

import json
import shutil
from pathlib import Path

import pytest

from lightning_rl.cli import main
from recipes.hangman.prepare import WORDS, prepare

ROOT = Path(__file__).parents[3]
MADE = ROOT / "build" / "verifiers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MADE / "made").exists(), reason="`make verifiers` makes the environment"
    ),
]


def test_the_game_of_another_package_trains_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "verifiers").symlink_to(MADE, target_is_directory=True)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    prepare(Path("runs/hangman"))
    short = ["--trainer.max_steps", "60", "--model.lr_scheduler.total_steps", "60"]
    assert main(["fit", "--config", "recipes/hangman/sft.yaml", *short]) == 0
    two = ["--data.groups_per_iteration", "4", "--data.iterations_per_epoch", "2"]
    two += ["--data.evaluation.prompts.limit", "4"]
    assert main(["fit", "--config", "recipes/hangman/grpo.yaml", *two]) == 0
    run = tmp_path / "runs/hangman/grpo/version_0"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    metrics = summary["metrics"]
    assert metrics["rollout/completed"] == 4 * 8
    assert metrics["rollout/rows_per_episode"] == 1
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert metrics["logged/game_reward"] == pytest.approx(metrics["reward/mean"])
    assert metrics["logged/turns"] > 2
    for line in (run / "rollouts.jsonl").read_text().splitlines():
        game = json.loads(line)
        assert game["prompt"]["columns"]["task"]["info"]["game"] == "Hangman-v0"
        said = {m["content"].strip("[]") for m in game["completion"] if m["role"] == "assistant"}
        # The game drew one of our words, and its reward is the share of it that was said.
        shares = {round(sum(c in said for c in word) / 3, 3) for word in WORDS}
        assert round(game["reward"], 3) in shares
