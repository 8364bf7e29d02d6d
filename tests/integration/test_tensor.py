"""Processes that have matrices together train as one, and their checkpoints are for all layouts."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from lightning_rl.callbacks import HFExport
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.ranks_resume import checkpoint_of, gone_on, saved
from tests.support.ranks_run import ITERATIONS, fit
from tests.support.ranks_tensor import OPTIONS, scenarios
from tests.support.tiny_models import save_random_model
from tests.support.two_ranks import (
    TOLERANCE,
    Results,
    by_processes,
    comparable,
    require_same_export,
    require_same_rollouts,
    run_two,
)

pytestmark = pytest.mark.timeout(900)  # the first test waits for all that its ranks train
SCENARIOS = by_processes(scenarios("", Path()))


@pytest.fixture(scope="module")
def model(folder) -> Path:
    """Two heads of keys, which two processes can share; a tied head, and biases."""
    sizes = {"vocab_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_random_model(
        folder / "model", make_tokenizer(), Qwen2Config, initializer_range=0.2, **sizes
    )
    return folder / "model"


@pytest.fixture(scope="module")
def alone(model, folder) -> Callable[[str], dict[str, Any]]:
    """The same on one process; ``whole`` is a run that leaves checkpoints."""

    @cache
    def run(name: str) -> dict[str, Any]:
        where = folder / "alone" / name
        if name == "whole":
            return saved(str(model), where, "auto")
        options = OPTIONS[name](str(model))
        return fit(str(model), where, "auto", HFExport(merge_adapters=True), **options)

    return run


@pytest.fixture(scope="module")
def two(model, folder, alone) -> Results:
    alone("whole")  # one of them goes on with it
    return run_two("tests.support.ranks_tensor", model, folder, *SCENARIOS["two"])


@pytest.fixture(scope="module")
def four(model, folder) -> Results:
    return run_two("tests.support.ranks_tensor", model, folder, *SCENARIOS["four"], ranks=4)


@pytest.fixture(scope="module")
def two_after_four(model, folder, four) -> Results:
    return run_two("tests.support.ranks_tensor", model, folder, *SCENARIOS["from_four"])


@pytest.mark.parametrize(
    ("ranks", "scenario", "name"),
    [
        *(("two", name, name) for name in OPTIONS),
        ("two", "offload", "plain"),
        ("four", "four_critic", "critic"),
        ("four", "four_lora", "lora"),
        ("four", "four_both", "critic"),
    ],
)
def test_processes_that_share_matrices_train_as_one(request, alone, folder, ranks, scenario, name):
    one, several = alone(name), request.getfixturevalue(ranks)(scenario)
    assert len(one["rows"]) == len(several[0]["rows"]) == ITERATIONS + 1
    require_same_rollouts(one, several)
    for expected, row in zip(one["rows"], several[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
    assert one["rows"][-1]["policy/kl_old"] > 1e-4
    require_same_export(folder / "alone" / name, folder / scenario)


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [
        ("two", "saved_file"), ("two", "saved_folder"), ("two", "saved_data"),
        ("four", "four_file"), ("four", "four_folder"),
    ],
)  # fmt: skip
def test_layouts_leave_checkpoints_of_the_same_run(request, alone, ranks, scenario):
    rows = request.getfixturevalue(ranks)(scenario)[0]["rows"]
    for expected, row in zip(alone("whole")["rows"], rows, strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [
        *(("two", f"{name}_to_data") for name in ("file", "folder")),
        *(("two", f"{name}_to_tensor") for name in ("data", "one", "folder")),
        ("four", "four_on"),
        *(("two_after_four", f"{name}_from_four") for name in ("file", "folder")),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(request, alone, ranks, scenario):
    require_rest(alone("whole"), request.getfixturevalue(ranks)(scenario)[0])


@pytest.mark.parametrize(("ranks", "scenario"), [("two", "saved_file"), ("four", "four_file")])
def test_one_process_goes_on_with_what_others_saved(request, alone, model, folder, ranks, scenario):
    request.getfixturevalue(ranks)(scenario)
    path = checkpoint_of(folder / scenario, "iteration_2.ckpt")
    where = folder / "alone" / f"rest_of_{scenario}"
    require_rest(alone("whole"), gone_on(str(model), where, "auto", path))


def require_rest(whole: dict[str, Any], rest: dict[str, Any]) -> None:
    """The last two iterations of four, moments of the optimizer included."""
    assert len(rest["rollouts"]) == 2
    for expected, row in zip(whole["rows"][-2:], rest["rows"][-2:], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)


def test_a_rank_never_holds_the_whole_model(two):
    """Rank 0 reads it; the other gets its parts of policy and reference, one tensor at a time.

    A tensor is scattered over the mesh dimension by dimension, each time with a copy; gloo lets go
    of these a little sooner or later.
    """
    first, second = two("loaded")
    assert first["whole"] == second["whole"] > 20 * second["largest"]
    assert first["peak"] < 1.5 * first["whole"]
    assert second["peak"] < second["whole"] / 2 + 8 * second["largest"]


def test_bfloat16_computes_and_float32_is_trained(two):
    for rank in two("bf16"):
        assert rank["gathered"] == ["torch.bfloat16"]
        assert rank["trained"] == ["torch.float32"]  # weights and gradients
        assert math.isfinite(rank["rows"][-1]["policy/loss"])
