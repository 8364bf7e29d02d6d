"""Mixtures of experts: in vLLM what is pushed is computed with; two processes train one."""

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import forked
from tests.support.mixtures import KINDS, saved_mixture
from tests.support.ranks_experts import REPLAYED
from tests.support.ranks_run import HFExport, fit
from tests.support.two_ranks import TOLERANCE, comparable, run_two


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_computes_with_pushed_experts(kind, tmp_path):
    """After a first push, and a second: on CPUs vLLM packs experts by itself only at its start."""
    output = tmp_path / "output"
    status = forked.run("tests.support.pushed_experts", [kind, tmp_path], output)
    assert status == 0, output.read_text()[-3000:]
    assert output.read_text().endswith("pushed\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def results(model, folder):
    return run_two("tests.support.ranks_experts", model, folder)


@pytest.fixture(scope="module")
def alone(model, folder):
    """The same on one process."""
    return fit(str(model), folder / "alone", "auto", HFExport(), **REPLAYED)


def exported(folder):
    return load_file(folder / "lightning_logs" / "version_0" / "hf" / "model.safetensors")


@pytest.mark.parametrize("scenario", ["ddp", "sharded"])
def test_two_processes_train_a_mixture_as_one(results, alone, folder, model, scenario):
    """Each with all of it, or with half. Metrics of experts are of packs, which differ."""
    for expected, row in zip(alone["rows"], results(scenario)[0]["rows"], strict=True):
        ours, theirs = (
            {n: v for n, v in comparable(r).items() if not n.startswith("experts/")}
            for r in (row, expected)
        )
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)
    one, two = exported(folder / "alone"), exported(folder / scenario)
    start = load_file(model / "model.safetensors")
    assert one.keys() == two.keys() == start.keys()
    moved = torch.cat([(one[name] - start[name]).flatten() for name in one]).norm()
    apart = torch.cat([(one[name] - two[name]).flatten() for name in one]).norm()
    assert moved > 0
    assert apart < 0.01 * moved


def test_sharded_experts_are_balanced_and_replayed(results):
    for rank in results("recomputed"):
        for row in rank["rows"][1:]:
            assert row["experts/balance_loss"] > 1
            assert row["experts/load_entropy"] > 0
