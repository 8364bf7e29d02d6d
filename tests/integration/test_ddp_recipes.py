"""Test the recipes on two processes, as a user starts them, with vLLM.

Slow: each recipe starts two processes, which import all and start a vLLM each.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.run.processes.machine import usable_cores
from tests.support.two_ranks import ROOT, TOLERANCE

SECONDS = 590
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{n}=", "answer": "".join(sorted(str(n)))} for n in range(10, 42)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_to_the_end(tmp_path, *command, **variables) -> str:
    """Return what a command prints; Lightning starts the second process by itself.

    ``variables`` are those of its environment, None for one that it shall not have.
    """
    environment = os.environ | {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"} | variables
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            env={name: value for name, value in environment.items() if value is not None},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
    printed = (tmp_path / "output").read_text()
    assert status == 0, printed[-3000:]
    return printed


def fit(tmp_path, model, prompts, *more, **environment) -> list[dict[str, float]]:
    """Return the recipe's metrics, row by row: four groups of four rollouts, for two iterations."""
    reward = tmp_path / "reward.yaml"
    reward.write_text(
        "data: {init_args: {rewards: [tests.support.ranks_run.share_of_even_digits]}}\n"
    )
    options = {
        "model.model": model,
        "data.train_prompts.path": prompts,
        "data.evaluation.prompts.path": prompts,
        "data.groups_per_iteration": 4,
        "data.group_size": 4,
        "data.iterations_per_epoch": 2,
        "trainer.accelerator": "cpu",
        "trainer.logger.save_dir": tmp_path,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    files = ["--config", "recipes/sort_digits/grpo.yaml", "--config", reward]
    run_to_the_end(tmp_path, "lightning_rl", "fit", *files, *flags, *more, **environment)
    [file] = tmp_path.rglob("metrics.jsonl")
    assert json.loads((file.parent / "summary.json").read_text())["status"] == "completed"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_flag_is_enough(tiny_model, tmp_path, prompts):
    """Two processes train as one does: the same rollouts and optimizer steps, by vLLM in each."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    alone = fit(folders[0], tiny_model, prompts, OMP_NUM_THREADS="1")
    together = fit(folders[1], tiny_model, prompts, "--trainer.devices", "2", OMP_NUM_THREADS=None)
    printed = (folders[1] / "output").read_text()
    cores = usable_cores()
    each = f"using 2 processes of {max(1, cores // 2)} thread"
    assert [line.startswith(each) for line in printed.splitlines()].count(True) == 1
    assert "Starting with 2 processes" in printed
    compared = ("reward/mean", "rollout/tokens_mean", "policy/grad_norm", "policy/kl_old")
    assert [row["iteration"] for row in together] == [0, 1, 2]
    for one, two in zip(alone[1:], together[1:], strict=True):
        assert two["rollout/completed"] == 16
        assert {name: two[name] for name in compared} == pytest.approx(
            {name: one[name] for name in compared}, rel=TOLERANCE, abs=TOLERANCE
        )
        assert two["sync/probe_gap"] < 1e-3
        assert two["policy/grad_norm"] > 0


def test_the_recipe_on_two_processes_with_one_server(tiny_model, tmp_path, prompts):
    """One server works for both processes while they train."""
    variants = [f"recipes/sort_digits/variants/{name}.yaml" for name in ("server", "ddp")]
    rows = fit(tmp_path, tiny_model, prompts, *(w for file in variants for w in ("--config", file)))
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert [row["sync/version"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["rollout/completed"] == 16
        assert row["sync/probe_gap"] < 1e-3
        assert row["policy/grad_norm"] > 0
    # What prefetches goes on with new weights in mid-rollout, which then two versions wrote.
    assert rows[1]["rollout/logprob_gap_max"] < 1e-3


def test_the_bare_loop_on_two_processes(tiny_model, tmp_path, prompts):
    printed = run_to_the_end(
        tmp_path, "recipes.sort_digits.bare_loop",
        "--model", tiny_model, "--prompts", prompts, "--iterations", 2, "--devices", 2,
    )  # fmt: skip
    told = re.findall(r"^iteration (\d): reward .*, engine-trainer gap (\S+)$", printed, re.M)
    assert [iteration for iteration, _ in told] == ["1", "2"]  # once, by rank 0
    assert all(float(gap) < 1e-3 for _, gap in told)
