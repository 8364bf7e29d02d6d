"""Processes with a share of the weights each: what they hold, gather and learn."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.ranks_run import ITERATIONS, HFExport, LoRA, fit, in_minibatches
from tests.support.ranks_sharded import one_update, scenarios, separate
from tests.support.two_ranks import TOLERANCE, Results, comparable, run_two

FOUR = ("four_minibatches", "four_separate")


@pytest.fixture(scope="module")
def results(tiny_model, folder) -> Results:
    of_two = [name for name in scenarios("", Path()) if name not in FOUR]
    return run_two("tests.support.ranks_sharded", tiny_model, folder, *of_two)


@pytest.fixture(scope="module")
def four(tiny_model, folder) -> Results:
    """Four processes, which are more than the model has heads."""
    return run_two("tests.support.ranks_sharded", tiny_model, folder, *FOUR, ranks=4)


@pytest.fixture(scope="module")
def alone(tiny_model, folder) -> Callable[[str], dict[str, Any]]:
    """The same on one process, which keeps all activations."""
    model = str(tiny_model)
    options = {
        "plain": {},
        "lora": {"lora": LoRA(rank=4)},
        "separate": separate(model),
        "minibatches": in_minibatches(),
    }
    return cache(lambda name: fit(model, folder / "alone" / name, **options[name]))


def test_a_rank_never_holds_the_whole_model(results):
    """Rank 0 reads it; the other gets its half of policy and reference, one tensor at a time."""
    first, second = results("loaded")
    assert first["whole"] == second["whole"] > 20 * second["largest"]
    assert first["peak"] < 1.5 * first["whole"]
    assert second["peak"] < second["whole"] / 2 + 3 * second["largest"]


@pytest.mark.parametrize(
    ("ranks", "scenario", "name"),
    [
        ("results", "offload", "plain"),
        ("results", "recomputed", "plain"),
        ("results", "recomputed_lora", "lora"),
        ("results", "separate", "separate"),
        ("results", "sequence", "minibatches"),
        ("results", "sequence_lora", "lora"),
        ("results", "sequence_separate", "separate"),
        ("four", "four_minibatches", "minibatches"),
        ("four", "four_separate", "separate"),
    ],
)
def test_sharded_processes_train_as_one(request, alone, ranks, scenario, name):
    one, several = alone(name), request.getfixturevalue(ranks)(scenario)
    assert len(one["rows"]) == len(several[0]["rows"]) == ITERATIONS + 1
    assert several[0]["start"] == pytest.approx(one["start"], rel=TOLERANCE)
    for expected, row in zip(one["rows"], several[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
    assert one["rows"][-1]["policy/kl_old"] > 1e-4


def test_bfloat16_is_gathered_and_float32_trained(results):
    for rank in results("bf16"):
        assert rank["gathered"] == ["torch.bfloat16"]
        assert rank["trained"] == ["torch.float32"]  # weights and gradients
    for rank in results("bf16_true"):  # whose float32 masters are the optimizer's own
        assert rank["gathered"] == rank["trained"] == ["torch.bfloat16"]
        assert rank["rows"][-1]["policy/kl_old"] > 1e-4
    for rank in results("offload"):
        assert rank["gathered"] == rank["trained"] == ["torch.float32"]


def weights_of(directory: Path) -> Tensor:
    tensors = load_file(directory / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def test_gathering_bfloat16_rounds_no_more_than_computing_in_it(tiny_model, results, folder):
    """Of the same first update: apart by as much as bfloat16 on one process is from float32.

    That is a rounding of what is computed; weights that are gathered, and gradients that are
    reduced, are rounded besides. How much of that adds up differs from processor to processor.
    """
    results("bf16")
    exported = Path("lightning_logs", "version_0", "hf")
    for precision in ("bf16-mixed", "32-true"):
        where = folder / "alone" / precision
        fit(str(tiny_model), where, "auto", HFExport(), precision=precision, **one_update())
    start, exact = weights_of(tiny_model), weights_of(folder / "alone" / "32-true" / exported)
    one = weights_of(folder / "alone" / "bf16-mixed" / exported)
    two = weights_of(folder / "bf16" / exported)
    rounding = float((one - exact).norm() / (exact - start).norm())
    assert 1e-3 < rounding < 0.1
    for other in (one, exact):
        assert float((two - other).norm() / (exact - start).norm()) < 3 * rounding
