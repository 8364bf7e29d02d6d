"""Processes that share weights, micro-batches, matrices or experts train and go on as one.

It takes minutes, as a run of each layout is compared with one of one process, and every kind of
checkpoint is read by another layout.

Slow: about sixty layouts and features each train a run in two or four processes.
"""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config

from recipes.sort_digits.prepare import make_tokenizer
from tests.support.mixtures import saved_mixture
from tests.support.ranks_layouts import computed, loaded
from tests.support.ranks_settings import trained
from tests.support.tiny_models import save_random_model
from tests.support.two_ranks import (
    EXPORTED,
    TOLERANCE,
    checkpoint_of,
    comparable,
    require_same_export,
    require_same_rows,
    require_same_run,
)

pytestmark = pytest.mark.slow
OFFLOAD, FOLDER = {"cpu_offload": True}, {"save_distributed_checkpoint": True}
DDP, SEQUENCE, TENSOR, EXPERT = {"strategy": "ddp"}, {"sequence": 2}, {"tensor": 2}, {"expert": 2}


@pytest.fixture(scope="session")
def models(tiny_model, tmp_path_factory) -> dict[str, str]:
    """Return paths by kind.

    ``dense`` has two heads of keys, which two processes can share. Of the mixtures, tokens of
    ``all`` choose all experts, so that rounding chooses none, and those of ``some`` choose some;
    ``few`` has two experts. ``deep`` and ``deep_experts`` have many layers.
    """
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_random_model(
        folder / "dense", make_tokenizer(), Qwen2Config, initializer_range=0.2, **sizes
    )
    save_random_model(folder / "deep", make_tokenizer(), Qwen2Config, num_hidden_layers=8, **sizes)
    saved_mixture("mixtral", folder / "all", num_experts_per_tok=4)
    saved_mixture("mixtral", folder / "few", num_local_experts=2)
    saved_mixture("qwen3_moe", folder / "some")
    saved_mixture("qwen3_moe", folder / "deep_experts", num_hidden_layers=16)
    return {path.name: str(path) for path in folder.iterdir()} | {"tiny": str(tiny_model)}


@pytest.fixture(scope="session")
def run(together, models):
    """Return results by rank of a run in a layout; of one process, if there is no layout."""

    def run(kind: str, names: str, ranks: int, layout: dict[str, Any] | None, **options: Any):
        if layout is None:
            return [together.alone(trained, models[kind], names, **options)]
        options = {"strategy": "sharded"} | layout | options
        return together(ranks, trained, models[kind], names, **options)

    return run


@pytest.mark.parametrize(
    ("kind", "names", "also", "ranks", "layout"),
    [
        ("dense", "minibatches", "", 2, OFFLOAD),
        ("dense", "lora base", "host", 2, {}),
        ("dense", "minibatches", "", 2, SEQUENCE),
        ("dense", "lora base", "attention", 2, SEQUENCE),
        ("dense", "separate minibatches", "", 2, SEQUENCE),
        ("tiny", "separate minibatches", "recomputed", 4, {"sequence": 4}),  # of two heads
        ("dense", "minibatches", "", 2, TENSOR),
        ("dense", "minibatches", "", 2, TENSOR | OFFLOAD),
        ("dense", "minibatches", "host", 2, TENSOR),
        ("dense", "lora base", "", 2, TENSOR),
        ("dense", "renewed", "", 2, TENSOR),
        ("dense", "critic clipped", "", 2, TENSOR),
        ("dense", "separate minibatches", "", 2, TENSOR),
        ("dense", "critic clipped", "", 4, TENSOR),
        ("dense", "lora base", "", 4, TENSOR),
        ("dense", "critic clipped", "", 4, TENSOR | SEQUENCE),
        ("some", "replayed", "", 2, DDP),
        ("some", "replayed", "", 2, {}),
        ("some", "replayed", "", 2, EXPERT),
        ("all", "minibatches", "", 2, EXPERT),
        ("all", "minibatches", "", 2, EXPERT | OFFLOAD),
        ("all", "lora base", "", 2, EXPERT),
        ("all", "renewed", "", 2, EXPERT),
        ("all", "critic clipped", "", 2, EXPERT),
        ("all", "separate minibatches", "", 2, EXPERT),
        ("all", "minibatches", "", 4, EXPERT),
        ("all", "critic clipped", "", 4, EXPERT),
        ("all", "minibatches", "", 4, {"expert": 4}),
        ("few", "minibatches", "", 4, EXPERT),  # two processes have half of an expert each
        ("all", "critic clipped", "", 4, EXPERT | SEQUENCE),
    ],
)
def test_processes_train_as_one(run, kind, names, also, ranks, layout):
    [one] = run(kind, f"{names} export", 1, None)
    several = run(kind, f"{names} export {also}", ranks, layout)
    require_same_run(one, several)
    require_same_export(one, several[0])


def test_balance_and_replay_are_those_of_processes_with_all_experts(run):
    """Recomputed layers send their tokens once more, to the same experts."""
    several = (run("some", "balanced attention", 2, layout) for layout in (EXPERT, {}))
    for ours, theirs in zip(*several, strict=True):
        for row, expected in zip(ours["rows"], theirs["rows"], strict=True):
            close = pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
            assert comparable(row) == close
        assert all(row["experts/balance_loss"] > 1 for row in ours["rows"][1:])
        assert all(row["experts/load_entropy"] > 0 for row in ours["rows"][1:])


def test_processes_that_share_micro_batches_measure_their_experts(run):
    """The micro-batches are the same, whether one process computes their tokens, or two."""
    for ours, theirs in zip(
        *(run("some", "", 2, layout) for layout in (SEQUENCE, {})), strict=True
    ):
        for row, expected in zip(ours["rows"], theirs["rows"], strict=True):
            found, wanted = (
                {name: value for name, value in each.items() if name.startswith("experts/")}
                for each in (row, expected)
            )
            assert found == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
        assert all(row["experts/overload"] > 0 for row in ours["rows"][1:])


@pytest.mark.parametrize(
    ("kind", "ranks", "layout", "ranks_after", "layout_after"),
    [
        ("dense", 1, None, 2, TENSOR | FOLDER),
        ("dense", 2, FOLDER, 2, TENSOR),
        ("dense", 2, TENSOR, 1, None),
        ("dense", 2, TENSOR, 2, {}),
        ("dense", 2, TENSOR | FOLDER, 2, {}),
        ("dense", 2, TENSOR | FOLDER, 2, TENSOR),
        ("dense", 4, TENSOR, 1, None),
        ("dense", 4, TENSOR, 2, TENSOR),
        ("dense", 4, TENSOR | FOLDER, 2, {}),
        ("dense", 4, TENSOR | FOLDER, 4, TENSOR | FOLDER),
        ("all", 1, None, 2, EXPERT | FOLDER),
        ("all", 2, FOLDER, 2, EXPERT),
        ("all", 2, EXPERT, 1, None),
        ("all", 2, EXPERT, 2, {}),
        ("all", 2, EXPERT | FOLDER, 2, {}),
        ("all", 4, EXPERT | FOLDER, 2, EXPERT),
        ("all", 4, EXPERT | FOLDER, 4, {"expert": 4}),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(
    run, kind, ranks, layout, ranks_after, layout_after
):
    """The run does the rest of three iterations, with the moments of the optimizer."""
    [whole] = run(kind, "saved brief", 1, None)
    begun = run(kind, "saved brief", ranks, layout)[0]
    require_same_rows(whole["rows"], begun["rows"])
    path = str(checkpoint_of(begun, "iteration_1.ckpt"))
    rest = run(kind, "saved brief", ranks_after, layout_after, ckpt_path=path)[0]
    assert len(rest["rollouts"]) == 2
    require_same_rows(whole["rows"][-2:], rest["rows"][-2:])


@pytest.mark.parametrize(
    ("kind", "layout"), [("deep", {}), ("deep", TENSOR), ("deep_experts", EXPERT)]
)
def test_a_rank_never_holds_the_whole_model(together, models, kind, layout):
    """Rank 0 reads it; the other gets its parts of policy and reference, one tensor at a time.

    A tensor is scattered over the mesh dimension by dimension, each time with a copy; gloo lets go
    of these a little sooner or later, of three or four on a busy machine.
    """
    first, second = together(2, loaded, models[kind], **layout)
    assert first["whole"] == second["whole"] > 40 * second["largest"]
    assert first["peak"] < 1.5 * first["whole"]
    assert second["peak"] < second["whole"] / 2 + 14 * second["largest"]


@pytest.mark.parametrize(
    ("kind", "names", "layout", "gathered", "trained"),
    [
        ("tiny", "one_update bf16 export", {}, "bfloat16", "float32"),
        ("dense", "one_update bf16", TENSOR, "bfloat16", "float32"),
        ("all", "one_update bf16", EXPERT, "bfloat16", "float32"),
        # Its float32 masters are the optimizer's own.
        ("tiny", "bf16_true", {}, "bfloat16", "bfloat16"),
        ("tiny", "one_update", OFFLOAD, "float32", "float32"),
    ],
)
def test_one_dtype_computes_and_one_is_trained(
    together, models, kind, names, layout, gathered, trained
):
    for rank in together(2, computed, models[kind], names, **layout):
        assert rank["gathered"] == [f"torch.{gathered}"]
        assert rank["trained"] == [f"torch.{trained}"]  # weights and gradients
        if "one_update" not in names:
            assert rank["rows"][-1]["policy/kl_old"] > 1e-4


def test_experts_that_travel_in_bfloat16_learn_as_those_that_stay(together, models):
    """Experts' parts of gradients are rounded before they add up."""
    model, names = models["all"], "one_update bf16"
    found, expected = (
        together(2, computed, model, names, **layout)[0]["rows"][-1] for layout in (EXPERT, {})
    )
    assert found["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=0.02)
    assert found["policy/entropy"] == pytest.approx(expected["policy/entropy"], rel=0.01)


def weights_of(path) -> torch.Tensor:
    tensors = load_file(path)
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def test_gathering_bfloat16_rounds_no_more_than_computing_in_it(together, tiny_model):
    """The runs differ after the same first update by as much as one process's two precisions.

    That is a rounding of what is computed; weights that are gathered, and gradients that are
    reduced, are rounded besides. How much of that adds up differs from processor to processor.
    """
    model = str(tiny_model)
    runs = [
        together.alone(trained, model, "one_update export"),
        together.alone(trained, model, "one_update bf16 export"),
        together(2, computed, model, "one_update bf16 export")[0],
    ]
    start = weights_of(tiny_model / "model.safetensors")
    exact, one, two = (weights_of(run["where"] / EXPORTED) for run in runs)
    rounding = float((one - exact).norm() / (exact - start).norm())
    assert 1e-3 < rounding < 0.1
    for other in (one, exact):
        assert float((two - other).norm() / (exact - start).norm()) < 3 * rounding
