"""Test the commands from --print_config to a run, its validation and its rollouts."""

import json
import re

import pytest

from lightning_rl.cli import main

REWARDS = """
def starts_right(completions, answer, **columns):
    return [float(c[:1] == a[:1]) for c, a in zip(completions, answer)]
"""
ONE_RUN = [
    "--data.rewards=[cli_rewards.starts_right]",
    "--data.iterations_per_epoch=2",
    "--trainer.callbacks=[WeightSync, {class_path: Evaluate, init_args: {every_n_iterations: 1}}]",
    "--trainer.callbacks+=RunReport",
    "--trainer.enable_checkpointing=true",
    "--trainer.logger={class_path: CSVLogger, init_args: {save_dir: runs, name: '', version: fit}}",
]


def test_what_is_printed_runs_and_what_it_saved_is_validated(workplace, capsys):
    """`validate` finds the accuracy that `fit` ended with in the checkpoint that it saved."""
    (workplace / "cli_rewards.py").write_text(REWARDS)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "good.yaml", *ONE_RUN, "--print_config"])
    assert stop.value.code == 0
    (workplace / "printed.yaml").write_text(capsys.readouterr().out)
    assert main(["fit", "--config", "printed.yaml"]) == 0
    run = workplace / "runs" / "fit"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 2
    [checkpoint] = run.glob("checkpoints/iteration_*.ckpt")

    capsys.readouterr()
    saved = ["--config", str(run / "config.yaml"), "--ckpt_path", str(checkpoint)]
    assert main(["validate", *saved]) == 0
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if re.search(r"eval/accuracy\b", line)]
    accuracy = float(line.split("│")[2])
    assert accuracy == pytest.approx(summary["accuracy_after"], abs=1e-6)

    output = ["--config", "good.yaml", ONE_RUN[0], "--output", "out.jsonl"]
    assert main(["rollout", *output, "--iterations", "2"]) == 0
    rows = [json.loads(line) for line in (workplace / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 4 * 2  # iterations x groups x group_size
    assert {row["reward"] for row in rows} <= {0.0, 1.0}
    assert main(["rollout", *output, "--iterations", "3"]) == 0  # goes on where it stopped
    assert len((workplace / "out.jsonl").read_text().splitlines()) == 24
