"""Test staged runs in processes that are killed, with jobs that train.

Slow: a staged run is killed at every request that it makes, and each time resumed.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.cli import main
from lightning_rl.games.staged.jobs import JobReport, JobRequest
from lightning_rl.games.staged.local_jobs import LocalJobs
from lightning_rl.games.staged.training_sets import Pair, Preferences
from lightning_rl.models.policy import Policy
from tests.support.tiny_models import chatml_tokenizer, save_random_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def last_line(*command: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("every", "least"), [("40", 6), ("1", 100)])
def test_killed_at_requests_a_run_buys_no_job_twice_and_ends_as_if_it_had_not_been(
    tmp_path, every, least
):
    told = last_line("tests.support.staged_kills", str(tmp_path), every)
    assert told["points"] > least
    assert (told["unequal"], told["jobs_repeated"]) == ([], 0)


@pytest.mark.timeout(3600)
def test_killed_at_random_moments_with_local_jobs():
    told = last_line("benchmarks.staged_kill", "--points", "3")
    assert told == {"points": 3, "equal": 3, "jobs_repeated": 0}


# ---------------------------------------------------------------- local jobs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat") / "model"
    sizes = {"max_position_embeddings": 128, "initializer_range": 0.1}
    save_random_model(directory, chatml_tokenizer(), vocab_size=288, **sizes)
    return directory


def configuration(place: Path, model: Path) -> Path:
    rows = [{"number": n, "label": n % 2} for n in range(12)]
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompts = {"prover": {"user": "{number}: odd"}, "verifier": {"user": "{number}?"}}
    engine = {"class_path": "TransformersEngine", "init_args": {"device": "cpu"}}
    chat = {"engine": engine, "sampling": {"max_tokens": 3}}
    config = {
        "run_dir": "run",
        "protocol": "Adp",
        "scenario": {
            "class_path": "TextScenario",
            "init_args": {"prompts": prompts, "forced_guess": False},
        },
        "train": {"class_path": "JSONLPrompts", "init_args": {"path": "rows.jsonl"}},
        "groups": {
            "all": {
                "agents": ["prover", "verifier"],
                "model": str(model),
                "chat": {"class_path": "EngineChat", "init_args": chat},
                "jobs": {
                    "class_path": "LocalJobs",
                    "init_args": {"supervised": {"trainer": {"accelerator": "cpu"}}},
                },
            }
        },
        "algorithm": {
            "class_path": "ExpertIteration",
            "init_args": {"truth_share": 1},
        },
        "poll_s": 0.1,
        "seed": 1,
    }
    path = place / "staged.yaml"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_while_its_job_trains_finds_it_done(
    model, tmp_path, monkeypatch, capsys
):
    configuration(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    arguments = ["staged", "--config", "staged.yaml"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    command = [sys.executable, "-m", "lightning_rl", *arguments]
    process = subprocess.Popen(command, start_new_session=True)
    while not list(tmp_path.glob("run/jobs/*/pid")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    assert main(arguments) == 0
    [job] = (tmp_path / "run" / "jobs").iterdir()
    assert (job / "starts").read_text() == "."
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["stage"], state["iteration"]) == ("done", 1)
    [_, made] = state["groups"]["all"]["models"]
    assert made == f"run/jobs/{job.name}/model"
    # All that it learned is the truth: 12 right decisions, whatever the random model had said.
    rows = [json.loads(line) for line in (job / "rows.jsonl").read_text().splitlines()]
    words = {
        row["prompt"][0]["content"].split("?")[0]: row["completion"].splitlines()[-1]
        for row in rows
    }
    assert words == {str(n): ("reject", "accept")[n % 2] for n in range(12)}
    assert gap(model, made) > 1e-5
    assert (tmp_path / "run" / "models" / "all").resolve() == (tmp_path / made).resolve()

    # Another configuration is refused, but for what alters nothing.
    assert main([*arguments, "--max_concurrency", "3", "--poll_s", "9"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--algorithm", "MALT"]) == 2
    assert "algorithm: ExpertIteration then, MALT now" in capsys.readouterr().err
    assert main([*arguments, "--retest"]) == 2
    assert "test=null: there is nothing to test on" in capsys.readouterr().err


def gap(one: Path, other: str) -> float:
    """Return how far the weights of two models are apart."""
    theirs = dict(Policy(other).named_weights())
    weights = Policy(str(one)).named_weights()
    return max(float((w - theirs[name]).abs().max()) for name, w in weights)


@pytest.mark.timeout(600)
def test_a_job_of_pairs_raises_the_chosen_answer(model, tmp_path, monkeypatch):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    asked = [{"role": "user", "content": "2?"}]
    adamw = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}
    settings = {
        "model": {"init_args": {"optimizer": adamw}},
        "trainer": {"max_epochs": 5, "accelerator": "cpu"},
    }
    jobs = LocalJobs(preference=settings)
    jobs.open(tmp_path)
    request = JobRequest("pairs", str(model), Preferences([Pair(asked, "yes", "no")] * 12), 0)
    asyncio.run(jobs.create(request))
    while not (told := asyncio.run(jobs.report("pairs"))).status.over:
        time.sleep(0.1)
    assert told == JobReport("succeeded", str(tmp_path / "jobs/pairs/model"))
    margins = [margin(place) for place in (str(model), told.model)]
    assert margins[1] > margins[0] + 0.5


def margin(model: str) -> float:
    """Return log p(yes) - log p(no)."""
    tokenizer = chatml_tokenizer()
    lm = AutoModelForCausalLM.from_pretrained(model)
    asked = tokenizer("<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]

    def logprob(text: str) -> float:
        answer = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = lm(torch.tensor([asked + answer])).logits[0, len(asked) - 1 : -1]
        return float(logits.log_softmax(-1)[range(len(answer)), answer].sum())

    return logprob("yes") - logprob("no")
