"""Packs that several processes compute together: the same numbers and gradients as one by one."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen3Config

from benchmarks.parallel_ranks import FEATURES, KINDS
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.tiny_models import save_random_model
from tests.support.two_ranks import TOLERANCE, Results, run_two

pytestmark = pytest.mark.timeout(900)  # the first test waits for all that its ranks compare
OF_TWO = ("sequence", "tensor")
OF_FOUR = (
    "sequence_plain", "sequence_one_silent",
    "tensor_plain", "tensor_one_silent",  # two pairs, with packs of their own
    "both_plain", "both_separate",
)  # fmt: skip
PLANNED = ("sequence_kept", "both_kept")
TWO_HEADS = (
    "sequence_plain", "sequence_recomputed", "sequence_one_silent", "sequence_brief",
)  # fmt: skip
OF_WINDOWS = ("sequence_plain", "sequence_recomputed")
SMALL = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory) -> Results:
    """Two ranks; four heads on two of keys."""
    wanted = (*FEATURES, "kept", "peak")
    named = [f"{layout}_{what}" for layout in OF_TWO for what in wanted]
    return _started(folder / "two", Qwen2Config, 2, *named, num_key_value_heads=2)


@pytest.fixture(scope="module")
def four(folder) -> Results:
    """Four ranks; one head each, and fewer of keys than ranks; norms of queries and keys."""
    sizes = {"num_key_value_heads": 2, "head_dim": 16}
    return _started(folder / "four", Qwen3Config, 4, *OF_FOUR, *PLANNED, **sizes)


@pytest.fixture(scope="module")
def one_head(folder) -> Results:
    """Two ranks, which share its queries."""
    wanted = ("sequence_plain", "sequence_kept")
    return _started(folder / "one_head", Qwen2Config, 2, *wanted, **_heads(1, 1))


@pytest.fixture(scope="module")
def two_heads(folder) -> Results:
    """Four ranks, of which two share the heads, and two such pairs the queries."""
    wanted = (*TWO_HEADS, "sequence_kept", "sequence_kept_recomputed")
    return _started(folder / "two_heads", Qwen2Config, 4, *wanted, **_heads(2, 1))


@pytest.fixture(scope="module")
def one_left(folder) -> Results:
    """Four ranks; the two that share matrices have a head each."""
    sizes = _heads(2, 2) | {"head_dim": 16}
    return _started(folder / "one_left", Qwen3Config, 4, "both_plain", "both_kept", **sizes)


def _heads(query: int, key: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key}


@pytest.fixture(scope="module")
def through_windows(folder) -> Results:
    """As ``two_heads``; a layer sees seven tokens, and rollouts have up to 23."""
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    return _started(folder / "windows", Qwen2Config, 4, *OF_WINDOWS, **_heads(2, 1) | window)


def _started(folder: Path, kind: type, ranks: int, *only: str, **sizes: Any) -> Results:
    folder.mkdir()
    save_random_model(
        folder / "model", make_tokenizer(), kind, **SMALL | {"num_attention_heads": 4} | sizes
    )
    return run_two("benchmarks.parallel_ranks", folder / "model", folder, *only, ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [
        *(("two", f"{layout}_{feature}") for layout in OF_TWO for feature in FEATURES),
        *(("four", scenario) for scenario in OF_FOUR),
        ("one_head", "sequence_plain"),
        *(("two_heads", scenario) for scenario in TWO_HEADS),
        ("one_left", "both_plain"),
        *(("through_windows", scenario) for scenario in OF_WINDOWS),
    ],
)
def test_shared_packs_give_the_same_scores_and_gradients(request, ranks, scenario):
    for result in request.getfixturevalue(ranks)(scenario):
        close = TOLERANCE if scenario.endswith("float32") else 1e-12
        assert result["scores"] < close * max(1.0, result["score"])
        assert result["gradients"] < close * max(1.0, result["gradient"])
        if scenario.endswith((*KINDS, "float32")):
            assert result["numbers"] > 20
            assert result["gradient"] > 0.1


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        ("two", "sequence"),
        ("two", "tensor"),
        ("four", "sequence"),
        ("four", "both"),
        ("one_head", "sequence"),
        ("two_heads", "sequence"),
        ("one_left", "both"),
    ],
)
def test_each_keeps_a_share_of_a_rollouts_activations(request, ranks, layout):
    """As it is planned, but for what is kept to bring scores to their owner.

    The plan is of the rank that keeps most: those that share queries read more or fewer keys.
    """
    results = request.getfixturevalue(ranks)(f"{layout}_kept")
    most = max(result["together"] for result in results)
    assert most == pytest.approx(results[0]["planned"], rel=0.05)
    assert all(result["together"] > 0.8 * most for result in results)
    assert all(result["sent"] == result["formula"] for result in results)


def test_gathered_keys_are_not_kept_where_layers_are_recomputed(two_heads):
    """A share of layers' inputs is, and masks, and what brings scores to their owner.

    Keys and values of one layer alone would be nearly half as much again.
    """
    for result in two_heads("sequence_kept_recomputed"):
        assert result["together"] == pytest.approx(result["share"], rel=0.15)


def test_an_update_takes_the_memory_that_is_planned(two):
    """Of four, the most depends on how far they are apart: ``benchmarks.parallel`` tells it."""
    results = two("tensor_peak")
    most = max(result["measured"] for result in results)
    assert most == pytest.approx(results[0]["planned"], rel=0.05)
