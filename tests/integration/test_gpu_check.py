"""Each check of a GPU machine, tried on the CPU at a tiny size: there is no other chance to."""

import importlib

import pytest
import torch

from benchmarks.gpu import engines, kernels
from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.table import CHECKS, Check

BY_NAME = {check.name: check for check in CHECKS}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Shared, as it is in a run: one check uses what another one left."""
    return tmp_path_factory.mktemp("gpu_check")


@pytest.fixture
def tried(scratch, monkeypatch):
    """Run a check here: the imports, which take longest, are then done once for all of them."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything's, put back afterwards

    def run(check: Check) -> Bench:
        module, _, function = check.target.partition(":")
        bench = Bench("cpu", scratch, scratch / f"{check.name}.json")
        with torch.random.fork_rng(devices=[]):
            getattr(importlib.import_module(module), function)(bench, **check.options)
        return bench

    return run


@pytest.mark.parametrize("name", BY_NAME)
def test_a_trial_on_the_cpu(tried, name):
    try:
        bench = tried(BY_NAME[name])
    except Skipped as reason:
        pytest.skip(str(reason))
    assert bench.faults == []
    assert bench.figures


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
