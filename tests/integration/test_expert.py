"""Processes that have experts together train as one, and their checkpoints are for all layouts."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel_ranks import OF_MIXTURES
from lightning_rl.callbacks import HFExport
from tests.support.mixtures import saved_mixture
from tests.support.ranks_expert import OPTIONS, REPLAYED, scenarios
from tests.support.ranks_resume import checkpoint_of, gone_on, saved
from tests.support.ranks_run import ITERATIONS, fit
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
PACKS = {
    "two": [*(f"expert_{feature}" for feature in OF_MIXTURES), "mixed_plain"],
    "four": [
        "expert_plain", "expert_idle", "expert_one_silent",
        "pairs_plain", "pairs_idle", "pairs_again", "mixed_plain", "mixed_again",
    ],
}  # fmt: skip
"""By how many processes; those of four in pairs, too."""
COSTS = {"two": ["expert_kept", "expert_peak"], "four": ["expert_kept", "pairs_kept", "mixed_kept"]}
SCENARIOS = by_processes(scenarios("", Path()))


@pytest.fixture(scope="module")
def models(folder) -> Path:
    saved_mixture("mixtral", folder / "models" / "all", num_experts_per_tok=4)
    saved_mixture("mixtral", folder / "models" / "few", num_local_experts=2)
    saved_mixture("qwen3_moe", folder / "models" / "some")
    saved_mixture("qwen3_moe", folder / "models" / "deep", num_hidden_layers=16)
    return folder / "models"


@pytest.fixture(scope="module")
def alone(models, folder) -> Callable[[str], dict[str, Any]]:
    """The same on one process; ``whole`` is a run that leaves checkpoints."""

    @cache
    def run(name: str) -> dict[str, Any]:
        where, model = folder / "alone" / name, str(models / "all")
        if name == "whole":
            return saved(model, where, "auto")
        if name == "replayed":
            return fit(str(models / "some"), where, "auto", HFExport(), **REPLAYED)
        if name == "few":
            model, name = str(models / "few"), "plain"
        options = OPTIONS[name](model)
        return fit(model, where, "auto", HFExport(merge_adapters=True), **options)

    return run


@pytest.fixture(scope="module")
def two(models, folder, alone) -> Results:
    alone("whole")  # one of them goes on with it
    return run_two("tests.support.ranks_expert", models, folder, *SCENARIOS["two"])


@pytest.fixture(scope="module")
def four(models, folder) -> Results:
    return run_two("tests.support.ranks_expert", models, folder, *SCENARIOS["four"], ranks=4)


@pytest.fixture(scope="module")
def two_after_four(models, folder, four) -> Results:
    return run_two("tests.support.ranks_expert", models, folder, *SCENARIOS["from_four"])


@pytest.fixture(scope="module")
def packs(tmp_path_factory) -> Callable[[str, str], Results]:
    """Scores and gradients of single packs, by a kind of model and how many processes."""

    @cache
    def run(kind: str, ranks: str) -> Results:
        folder = tmp_path_factory.mktemp(f"{kind}_{ranks}")
        count = {"two": 2, "four": 4}[ranks]
        model = saved_mixture(kind, folder / "model", num_attention_heads=count)
        wanted = PACKS[ranks] + COSTS[ranks]
        return run_two("benchmarks.parallel_ranks", model, folder, *wanted, ranks=count)

    return run


@pytest.mark.parametrize(
    ("kind", "ranks", "scenario"),
    [
        (kind, ranks, scenario)
        for kind, ranks in (("qwen3_moe", "two"), ("qwen3_moe", "four"), ("mixtral", "two"))
        for scenario in PACKS[ranks]
    ],
)
def test_tokens_that_travel_give_the_same_scores_and_gradients(packs, kind, ranks, scenario):
    for result in packs(kind, ranks)(scenario):
        close = TOLERANCE if scenario.endswith("float32") else 1e-12
        assert result["scores"] < close * max(1.0, result["score"])
        assert result["gradients"] < close * max(1.0, result["gradient"])
        if not scenario.endswith(("silent", "brief")):
            assert result["numbers"] > 20
            assert result["gradient"] > 0.1


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [(ranks, scenario) for ranks, names in COSTS.items() for scenario in names],
)
def test_each_keeps_and_sends_what_an_even_load_takes(packs, ranks, scenario):
    for result in packs("qwen3_moe", ranks)(scenario):
        if scenario.endswith("kept"):
            assert result["together"] == pytest.approx(result["planned"], rel=0.05)
            assert result["sent"] == result["formula"]
        else:
            assert result["measured"] == pytest.approx(result["planned"], rel=0.05)


def require_same_rows(expected: list[dict[str, float]], rows: list[dict[str, float]]) -> None:
    """But for experts, whose metrics are of packs: other processes cut others."""
    for one, several in zip(expected, rows, strict=True):
        ours, theirs = (
            {n: v for n, v in comparable(row).items() if not n.startswith("experts/")}
            for row in (several, one)
        )
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("ranks", "scenario", "name"),
    [
        *(("two", name, name) for name in OPTIONS),
        ("two", "replayed", "replayed"),
        ("two", "offload", "plain"),
        ("four", "four_plain", "plain"),
        ("four", "four_clipped", "clipped"),
        ("four", "four_all", "plain"),
        ("four", "four_rows", "few"),  # two processes have the same expert, and half of it each
        ("four", "four_both", "clipped"),
    ],
)
def test_processes_that_share_experts_train_as_one(request, alone, folder, ranks, scenario, name):
    one, several = alone(name), request.getfixturevalue(ranks)(scenario)
    rows = several[0]["rows"]
    assert len(rows) == (REPLAYED["iterations"] if name == "replayed" else ITERATIONS) + 1
    require_same_rollouts(one, several)
    require_same_rows(one["rows"], rows)
    assert one["rows"][-1]["policy/kl_old"] > 1e-4
    require_same_export(folder / "alone" / name, folder / scenario)


def test_balance_and_replay_are_those_of_processes_with_all_experts(two):
    """Recomputed layers send their tokens once more, to the same experts."""
    for ours, theirs in zip(two("balanced"), two("balanced_data"), strict=True):
        for row, expected in zip(ours["rows"], theirs["rows"], strict=True):
            close = pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
            assert comparable(row) == close
        assert ours["rows"][-1]["experts/balance_loss"] > 1


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [*(("two", f"saved_{kind}") for kind in ("file", "folder", "data")), ("four", "four_folder")],
)
def test_layouts_leave_checkpoints_of_the_same_run(request, alone, ranks, scenario):
    require_same_rows(alone("whole")["rows"], request.getfixturevalue(ranks)(scenario)[0]["rows"])


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [
        *(("two", f"{name}_to_data") for name in ("file", "folder")),
        *(("two", f"{name}_to_expert") for name in ("data", "one")),
        ("four", "four_on"),
        ("two_after_four", "folder_from_four"),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(request, alone, ranks, scenario):
    require_rest(alone("whole"), request.getfixturevalue(ranks)(scenario)[0])


def test_one_process_goes_on_with_what_others_saved(alone, two, models, folder):
    two("saved_file")
    path = checkpoint_of(folder / "saved_file", "iteration_2.ckpt")
    where = folder / "alone" / "rest"
    require_rest(alone("whole"), gone_on(str(models / "all"), where, "auto", path))


def require_rest(whole: dict[str, Any], rest: dict[str, Any]) -> None:
    """The last two iterations of four, moments of the optimizer included."""
    assert len(rest["rollouts"]) == 2
    require_same_rows(whole["rows"][-2:], rest["rows"][-2:])


def test_a_rank_never_holds_the_whole_model(two):
    """Rank 0 reads it; the other gets its parts of policy and reference, one tensor at a time."""
    first, second = two("loaded")
    assert first["whole"] == second["whole"] > 40 * second["largest"]
    assert first["peak"] < 1.5 * first["whole"]
    assert second["peak"] < second["whole"] / 2 + 8 * second["largest"]


def test_bfloat16_computes_and_float32_is_trained(two):
    """What travels has 16 bits, too; experts' parts of gradients are rounded before they add up."""
    for rank, data in zip(two("bf16"), two("bf16_data"), strict=True):
        assert rank["gathered"] == ["torch.bfloat16"]
        assert rank["trained"] == ["torch.float32"]  # weights and gradients
        found, expected = rank["rows"][-1], data["rows"][-1]
        assert found["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=0.02)
        assert found["policy/entropy"] == pytest.approx(expected["policy/entropy"], rel=0.01)
