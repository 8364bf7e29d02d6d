"""Two processes, and one for comparison: the same rollouts, the same losses, the same errors."""

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lightning_rl.errors import ConfigError
from tests.ranks_run import (
    GROUP_SIZE,
    GROUPS,
    ITERATIONS,
    HFExport,
    LoRA,
    critic,
    everything,
    fit,
)

ROOT = Path(__file__).parents[2]
SECONDS = 270
# Sampled tokens are equal, so what is left is the order in which float32 numbers are added.
TOLERANCE = 1e-5

Results = Callable[[str], list[dict[str, Any]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(tiny_model, folder) -> Results:
    """What each scenario of tests/ranks_run.py left, by rank; two processes run them all."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.ranks_run", str(tiny_model), str(folder)]
    processes = []
    try:
        for rank in ("0", "1"):
            with (folder / f"output_{rank}").open("w") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment | {"RANK": rank, "LOCAL_RANK": rank},
                        cwd=ROOT,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        statuses = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [(folder / f"output_{rank}").read_text()[-3000:] for rank in range(2)]
    assert statuses == [0, 0], "\n\n".join(outputs)

    def of(scenario: str) -> list[dict[str, Any]]:
        return [json.loads((folder / f"{scenario}_{rank}.json").read_text()) for rank in range(2)]

    return of


@pytest.fixture(scope="module")
def alone(tiny_model, folder) -> Callable[[str], dict[str, Any]]:
    """The same on one process."""
    model = str(tiny_model)
    runs = {
        "plain": lambda where: fit(model, where, "auto", *everything()),
        "critic": lambda where: fit(model, where, **critic()),
        "lora": lambda where: fit(model, where, "auto", HFExport(), lora=LoRA(rank=4)),
        "curriculum": lambda where: fit(model, where, curriculum=True),
    }
    done: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in done:
            done[name] = runs[name](folder / "alone" / name)
        return done[name]

    return run


def comparable(row: dict[str, float]) -> dict[str, float]:
    """Without what depends on time, or is itself an error of rounding."""
    timed = ("time/", "sync/seconds", "rollout/tokens_per_s")
    noise = ("sync/probe_gap", "rollout/logprob_gap")
    return {name: value for name, value in row.items() if not name.startswith(timed + noise)}


@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        ("ddp", "plain"),
        ("fsdp", "plain"),
        ("shared", "plain"),
        ("ddp_critic", "critic"),
        ("fsdp_critic", "critic"),
        ("fsdp_lora", "lora"),
        ("curriculum", "curriculum"),
    ],
)
def test_two_processes_train_as_one(results, alone, scenario, name):
    one, two = alone(name), results(scenario)
    for iteration in range(ITERATIONS):
        shares = [rank["rollouts"][iteration] for rank in two]
        assert [len(share) for share in shares] == [GROUPS * GROUP_SIZE // 2] * 2
        assert sorted(shares[0] + shares[1]) == sorted(map(list, one["rollouts"][iteration]))
    assert len(one["rows"]) == len(two[0]["rows"]) == ITERATIONS + 1
    for expected, row in zip(one["rows"], two[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
    # Engine and trainer agree on every rank, and the policy moved.
    assert all(row["sync/probe_gap"] < 1e-4 for row in two[0]["rows"])
    assert one["rows"][-1]["policy/kl_old"] > 1e-4


@pytest.mark.parametrize("scenario", ["ddp", "fsdp", "shared"])
def test_all_ranks_monitor_the_same(results, scenario):
    first, second = results(scenario)
    assert first["monitored"] == second["monitored"]
    assert "eval/accuracy" in first["monitored"][-1]


@pytest.mark.parametrize(
    ("scenario", "name"), [("ddp", "plain"), ("fsdp", "plain"), ("fsdp_lora", "lora")]
)
def test_exports_are_equal(results, alone, folder, scenario, name):
    alone(name), results(scenario)
    file = Path("lightning_logs", "version_0", "hf", "model.safetensors")
    one, two = load_file(folder / "alone" / name / file), load_file(folder / scenario / file)
    assert one.keys() == two.keys()
    for tensor in one:
        assert float((one[tensor] - two[tensor]).abs().max()) < TOLERANCE, tensor


def test_one_run_directory_with_rank_0s_rollouts_and_their_logprobs(results, alone, folder):
    results("fsdp"), alone("plain")
    recorded = {}
    for run in ("fsdp", "alone/plain"):
        assert [path.name for path in (folder / run / "lightning_logs").iterdir()] == ["version_0"]
        lines = (folder / run / "lightning_logs/version_0/recorded.jsonl").read_text().splitlines()
        recorded[run] = {line["id"]: line for line in map(json.loads, lines)}
    assert len(recorded["fsdp"]) == ITERATIONS * GROUPS * GROUP_SIZE // 2
    for name, line in recorded["fsdp"].items():
        other = recorded["alone/plain"][name]
        assert line["trainer_logprobs"] == pytest.approx(other["trainer_logprobs"], abs=TOLERANCE)
        assert any(line["trainer_logprobs"])


def test_filters_that_reject_more_on_one_rank_lose_no_prompt(results):
    ranks = results("filter")
    prompts = [r[0].split("/")[2] for rank in ranks for share in rank["rollouts"] for r in share]
    assert len(set(prompts)) == ITERATIONS * GROUPS  # no prompt twice
    row = ranks[0]["rows"][1]
    assert (row["filter/NotOnRankOne"], row["rollout/skipped"]) == (2, 2 * GROUP_SIZE)


@pytest.mark.parametrize(
    ("scenario", "error", "message"),
    [
        ("reward_error", "RewardError", "6 of 6 rollouts could not be graded"),
        ("stale_error", "StaleWeightsError", "after the sync of version 1, engine and trainer"),
        ("push_error", "LightningRLError", "RuntimeError: out of memory"),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_its_error(results, scenario, error, message):
    first, second = results(scenario)
    assert first["error"] == error
    assert first["message"].startswith(f"rank 1: {message}")
    assert second["message"] in first["message"]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("config_error", "groups_per_iteration=3 cannot be shared by 2 processes"),
        ("tensor_parallel", "tensor_parallel_size=2 is not supported"),
    ],
)
def test_impossible_settings_are_refused(results, scenario, message):
    for rank in results(scenario):
        assert rank["error"] == "ConfigError"
        assert rank["message"].startswith(message)


@pytest.mark.parametrize(
    ("scenario", "trained"), [("resume_ddp", 3), ("resume_fsdp", 3), ("resume_shards", 2)]
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(results, scenario, trained):
    for rank in results(scenario):
        whole, rest = rank["whole"], rank["rest"]
        assert len(whole["rollouts"]) == 4
        assert rest["rollouts"] == whole["rollouts"][trained:]
        for expected, row in zip(whole["rows"][trained + 1 :], rest["rows"][1:], strict=True):
            assert comparable(row) == comparable(expected)
            assert math.isfinite(row["policy/loss"])


def test_a_checkpoint_of_two_processes_is_not_for_one(results, tiny_model, folder):
    results("resume_ddp")
    run = folder / "resume_ddp" / "whole" / "lightning_logs" / "version_0"
    checkpoint = run / "checkpoints" / "iteration_3.ckpt"
    with pytest.raises(ConfigError, match=r"of 2 processes, .* now there are 1; set trainer.dev"):
        fit(str(tiny_model), folder / "other", iterations=2, epochs=2, ckpt_path=str(checkpoint))


def test_the_recipe_with_vllm_on_every_rank(tiny_model, tmp_path):
    """As a user does it: Lightning starts the second process."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}="}) + "\n" for n in range(10, 40)))
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
    command = [sys.executable, "-m", "lightning_rl", "fit", "--config", f"{recipe}/grpo.yaml"]
    command += ["--config", f"{recipe}/variants/ddp.yaml", "--config", str(reward)]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
    assert status == 0, (tmp_path / "output").read_text()[-3000:]
    run = tmp_path / "ddp" / "version_0"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert [row["iteration"] for row in history] == [0, 1, 2]
    for row in history[1:]:
        assert row["rollout/completed"] == 16
        assert row["sync/probe_gap"] < 1e-3
        assert row["rollout/logprob_gap_max"] < 1e-3
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
