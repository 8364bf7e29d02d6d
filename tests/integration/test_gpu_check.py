"""Test each check of a GPU machine, tried on the CPU at a tiny size: there is no other chance to.

Slow: each of 25 checks starts engines or trainers of its own, and two have layers compiled.
"""

import importlib
import inspect
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import engines, kernels
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.learning import main as learning_command
from benchmarks.gpu.peers.__main__ import main as peers_command
from benchmarks.gpu.table import CHECKS, Check
from benchmarks.house.modules import ROOT
from recipes.smollm2.tasks import ASKED, TASKS, questions
from tests.support.tiny_models import save_random_model, word_tokenizer

pytestmark = pytest.mark.slow

BY_NAME = {check.name: check for check in CHECKS}
ONE_EACH = {check.target: check for check in reversed(CHECKS)}
"""The first of the checks that are one function with other options."""


def function_of(check: Check) -> Callable[..., None]:
    module, _, function = check.target.partition(":")
    return getattr(importlib.import_module(module), function)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Share a folder, as it is in a run: one check uses what another one left."""
    return tmp_path_factory.mktemp("gpu_check")


@pytest.fixture
def tried(scratch, monkeypatch):
    """Run a check here: the imports, which take longest, are then done once for all of them."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything's, put back afterwards

    def run(check: Check) -> Bench:
        bench = Bench("cpu", scratch, scratch / f"{check.name}.json")
        with torch.random.fork_rng(devices=[]):
            function_of(check)(bench, **check.options)
        return bench

    return run


def names_to_try():
    """Yield the names; ``push-shared`` is slow: test_server.py starts two servers, too."""
    for check in CHECKS:
        if check in ONE_EACH.values():
            slow = [pytest.mark.slow] if check.name == "push-shared" else []
            yield pytest.param(check.name, marks=slow)


@pytest.mark.parametrize("name", names_to_try())
def test_a_trial_on_the_cpu(tried, name):
    bench = tried(BY_NAME[name])
    assert bench.faults == []
    assert bench.figures


def test_all_options_are_taken():
    for check in CHECKS:
        inspect.signature(function_of(check)).bind(None, **check.options)


def test_attention_that_is_wrong_is_found(tried, monkeypatch):
    right = kernels.packed_attention

    def blind_to_one(module, query, key, value, mask, **options):
        return right(
            module,
            query,
            key,
            torch.cat([value[:, :, :1] * 0, value[:, :, 1:]], 2),
            mask,
            **options,
        )

    monkeypatch.setattr(kernels, "packed_attention", blind_to_one)
    bench = tried(BY_NAME["attention"])
    assert len(bench.faults) == len(bench.figures)
    assert "off by" in bench.faults[0]


def test_a_push_that_does_not_arrive_is_found(tried, monkeypatch):
    right = engines.push_to

    def only_the_first(engine, policy, version):
        if version == 0:
            right(engine, policy, version)

    monkeypatch.setattr(engines, "push_to", only_the_first)
    bench = tried(BY_NAME["push-float32"])
    [fault] = bench.faults
    assert fault.startswith("push 1: a greedy token is")


def test_a_trial_of_ours_beside_a_peer_that_is_not_there(capsys, tmp_path):
    trial = ["--device=cpu", "--only=full", "--iterations=2", f"--scratch={tmp_path}"]
    assert peers_command(trial) == 0
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    ours = [line for line in lines if line.get("side") == "full/ours" and "phase" in line]
    assert [line["phase"] for line in ours] == ["lot", "lot", "equal", "equal"]
    # Two groups of two completions: by lot of at most 12 tokens each, else of 4 and no other.
    assert all(4 <= line["written"] <= 48 and line["longest"] <= 12 for line in ours)
    assert [(line["written"], line["longest"]) for line in ours[2:]] == [(16, 4)] * 2
    assert all(line["passed"] >= line["written"] and line["flops"] > 0 for line in ours)
    assert summary["update_tokens_s"] > summary["update_written_s"] > 0
    assert set(summary["stages"]) >= {"import", "model", "engine", "first update"}
    assert set(summary["skipped"]) == {"full/trl", "full/trl-best"}
    assert summary["ratio_full"] is None
    # A small share of the time of all is no reason to begin what would not come to an end.
    assert peers_command([*trial, "--seconds=1"]) == 0
    *_, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert summary["skipped"]["full/ours"] == "1 s are left"


def test_a_trial_of_learning_with_a_random_model(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in ("benchmarks", "recipes"):
        (tmp_path / package).symlink_to(ROOT / package)
    asked = [q.text for task in TASKS for q in islice(questions(task, held_out=True), 128)]
    tokenizer = word_tokenizer([f"{text} {ASKED}" for text in asked])
    model = tmp_path / "runs" / "smollm2" / "model"
    save_random_model(model, tokenizer, vocab_size=len(tokenizer), max_position_embeddings=256)
    assert learning_command(["--device=cpu", "--seeds", "3", "--iterations=1"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    before, seed, summary = map(json.loads, lines)
    assert before["accuracy_before"] == summary["accuracy_before"] < 0.1
    assert (seed["seed"], summary["seeds"]) == (3, [3])
    assert summary["accuracy_after"] == seed["accuracy"] < 0.1
    assert 0 < seed["fit_s"] < seed["seconds"] < summary["seconds"]
    assert len(list(Path("runs/small_model/cpu-3").glob("*/hf/model.safetensors"))) == 1
