"""The recipes on two processes, as a user starts them, with vLLM."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.two_ranks import ROOT, SECONDS


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{n}=", "answer": "".join(sorted(str(n)))} for n in range(10, 42)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_to_the_end(tmp_path, *command) -> str:
    """What a command prints; Lightning starts the second process by itself."""
    environment = os.environ | {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            env=environment,
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


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    "variants",
    [["ddp"], pytest.param(["server", "ddp"], marks=pytest.mark.slow)],
    ids="-".join,
)
def test_the_recipe_on_two_processes(tiny_model, tmp_path, prompts, variants):
    """With vLLM in both; and with one server that works for both while they train."""
    reward = tmp_path / "reward.yaml"
    reward.write_text("data: {init_args: {rewards: [tests.ranks_run.share_of_even_digits]}}\n")
    recipe = "recipes/sort_digits"
    options = {
        "model.model": tiny_model,
        "data.train_prompts.path": prompts,
        "data.eval_prompts.path": prompts,
        "data.groups_per_iteration": 4,
        "data.group_size": 4,
        "data.iterations_per_epoch": 2,
        "trainer.accelerator": "cpu",
        "trainer.logger.save_dir": tmp_path,
    }
    files = [
        f"{recipe}/grpo.yaml",
        *(f"{recipe}/variants/{name}.yaml" for name in variants),
        reward,
    ]
    run_to_the_end(
        tmp_path, "lightning_rl", "fit", *(word for file in files for word in ("--config", file)),
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    )  # fmt: skip
    run = tmp_path / "ddp" / "version_0"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert [row["iteration"] for row in history] == [0, 1, 2]
    assert [row["sync/version"] for row in history] == [0, 1, 2]
    for row in history[1:]:
        assert row["rollout/completed"] == 16
        assert row["sync/probe_gap"] < 1e-3
        assert row["policy/grad_norm"] > 0
    # What works ahead goes on with new weights in mid-rollout, which then two versions wrote.
    gaps = [row["rollout/logprob_gap_max"] for row in history[1:]]
    assert (gaps[0] if "server" in variants else max(gaps)) < 1e-3
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_the_bare_loop_on_two_processes(tiny_model, tmp_path, prompts):
    printed = run_to_the_end(
        tmp_path, "recipes.sort_digits.bare_loop",
        "--model", tiny_model, "--prompts", prompts, "--iterations", 2, "--devices", 2,
    )  # fmt: skip
    told = re.findall(r"^iteration (\d): reward .*, engine-trainer gap (\S+)$", printed, re.M)
    assert [iteration for iteration, _ in told] == ["1", "2"]  # once, by rank 0
    assert all(float(gap) < 1e-3 for _, gap in told)
