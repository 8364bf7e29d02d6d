"""Processes that have matrices together train as one, and their checkpoints are for all layouts."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config

from lightning_rl.callbacks import HFExport
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.ranks_resume import checkpoint_of, gone_on, saved
from tests.support.ranks_run import ITERATIONS, fit
from tests.support.ranks_tensor import OPTIONS, scenarios
from tests.support.tiny_models import save_random_model
from tests.support.two_ranks import TOLERANCE, Results, comparable, run_two

EXPORTED = Path("lightning_logs", "version_0", "hf", "model.safetensors")


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
    named = [name for name in scenarios("", Path()) if not name.startswith("four")]
    return run_two("tests.support.ranks_tensor", model, folder, *named)


@pytest.fixture(scope="module")
def four(model, folder) -> Results:
    return run_two("tests.support.ranks_tensor", model, folder, "four", "four_both", ranks=4)


@pytest.mark.parametrize(
    ("ranks", "scenario", "name"),
    [
        *(("two", name, name) for name in OPTIONS),
        ("four", "four", "critic"),
        ("four", "four_both", "critic"),
    ],
)
def test_processes_that_share_matrices_train_as_one(request, alone, folder, ranks, scenario, name):
    one, several = alone(name), request.getfixturevalue(ranks)(scenario)
    assert len(one["rows"]) == len(several[0]["rows"]) == ITERATIONS + 1
    shares = zip(*(rank["rollouts"] for rank in several), strict=True)
    batches = [sorted(rollout for share in batch for rollout in share) for batch in shares]
    assert batches == [sorted(map(list, batch)) for batch in one["rollouts"]]
    for expected, row in zip(one["rows"], several[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
    assert one["rows"][-1]["policy/kl_old"] > 1e-4
    exported, whole = (
        load_file(folder / place / EXPORTED) for place in (scenario, f"alone/{name}")
    )
    assert exported.keys() == whole.keys()
    for key, weight in whole.items():
        torch.testing.assert_close(exported[key], weight, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("scenario", ["saved_file", "saved_folder", "saved_data"])
def test_layouts_leave_checkpoints_of_the_same_run(two, alone, scenario):
    for expected, row in zip(alone("whole")["rows"], two(scenario)[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(
    "scenario",
    ["file_to_data", "folder_to_data", "data_to_tensor", "one_to_tensor", "folder_to_tensor"],
)
def test_a_checkpoint_goes_on_in_another_layout(two, alone, scenario):
    require_rest(alone("whole"), two(scenario)[0])


def test_one_process_goes_on_with_what_two_that_share_matrices_saved(two, alone, model, folder):
    two("saved_file")
    path = checkpoint_of(folder / "saved_file", "iteration_2.ckpt")
    require_rest(alone("whole"), gone_on(str(model), folder / "alone" / "rest", "auto", path))


def require_rest(whole: dict[str, Any], rest: dict[str, Any]) -> None:
    """The last two iterations of four, moments of the optimizer included."""
    assert len(rest["rollouts"]) == 2
    for expected, row in zip(whole["rows"][-2:], rest["rows"][-2:], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
