"""Test micro-batches that several processes compute together: the same numbers and gradients as one
by one.

Slow: every layout computes in two or four processes that exchange each layer.
"""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen3Config

from benchmarks.parallel.ranks import FEATURES, OF_MIXTURES, measure
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.mixtures import saved_mixture
from tests.support.ranks_seeing import WAYS, see_together
from tests.support.tiny_models import save_random_model
from tests.support.tiny_vision import FAMILIES, save_vision_model
from tests.support.two_ranks import TOLERANCE

pytestmark = pytest.mark.slow


def dense(kind: type, query: int, key: int, **sizes: Any) -> Callable[..., Any]:
    """Saves a model with so many heads of queries and of keys."""
    small = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}
    heads = {"num_attention_heads": query, "num_key_value_heads": key}
    return lambda path: save_random_model(path, make_tokenizer(), kind, **small | heads | sizes)


def mixture(kind: str, heads: int) -> Callable[..., Any]:
    return lambda path: saved_mixture(kind, path, num_attention_heads=heads)


MODELS = {
    "dense": dense(Qwen2Config, 4, 2),
    # One head for each of four ranks, and fewer of keys than ranks; norms of queries and keys.
    "four_heads": dense(Qwen3Config, 4, 2, head_dim=16),
    # Two ranks share its queries.
    "one_head": dense(Qwen2Config, 1, 1),
    # Two of four ranks share the heads, and two such pairs the queries.
    "two_heads": dense(Qwen2Config, 2, 1),
    # The two of four ranks that share matrices have a head each.
    "one_left": dense(Qwen3Config, 2, 2, head_dim=16),
    # A layer sees seven tokens, and rollouts have up to 23.
    "windows": dense(
        Qwen2Config, 2, 1, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3_moe_2": mixture("qwen3_moe", 2),
    "qwen3_moe_4": mixture("qwen3_moe", 4),
    "mixtral": mixture("mixtral", 2),
}
OF_EXPERTS = [*(f"expert_{feature}" for feature in OF_MIXTURES), "mixed_plain"]
MICRO_BATCHES = {
    ("dense", 2): [f"{name}_{feature}" for name in ("sequence", "tensor") for feature in FEATURES],
    ("four_heads", 4): [
        "sequence_plain", "sequence_one_silent",
        "tensor_plain", "tensor_one_silent",  # two pairs, with micro-batches of their own
        "both_plain", "both_separate",
    ],
    ("one_head", 2): ["sequence_plain"],
    ("two_heads", 4): [
        "sequence_plain", "sequence_recomputed", "sequence_one_silent", "sequence_brief",
    ],
    ("one_left", 4): ["both_plain"],
    ("windows", 4): ["sequence_plain", "sequence_recomputed"],
    ("qwen3_moe_2", 2): OF_EXPERTS,
    ("mixtral", 2): OF_EXPERTS,
    ("qwen3_moe_4", 4): [
        "expert_plain", "expert_idle", "expert_one_silent",
        "pairs_plain", "pairs_idle", "pairs_again", "mixed_plain", "mixed_again",
    ],
}  # fmt: skip
"""Layouts with a feature, by the model and how many processes share its micro-batches."""


@pytest.fixture(scope="session")
def measured(together, tmp_path_factory) -> Callable[[str, int, str], list[dict[str, float]]]:
    """Return what each rank finds in a scenario of ``benchmarks.parallel.ranks``, with a model."""
    paths = {}

    def run(kind: str, ranks: int, scenario: str) -> list[dict[str, float]]:
        if kind not in paths:
            paths[kind] = str(tmp_path_factory.mktemp(kind) / "model")
            MODELS[kind](paths[kind])
        return together(ranks, measure, paths[kind], scenario)

    return run


@pytest.fixture(scope="session")
def families(tmp_path_factory) -> dict[str, str]:
    """Return models that see."""
    folder = tmp_path_factory.mktemp("families")
    return {family: str(save_vision_model(folder / family, family)) for family in FAMILIES}


@pytest.mark.parametrize(
    ("kind", "ranks", "scenario"),
    [(*model, scenario) for model, scenarios in MICRO_BATCHES.items() for scenario in scenarios],
)
def test_shared_micro_batches_give_the_same_scores_and_gradients(measured, kind, ranks, scenario):
    for result in measured(kind, ranks, scenario):
        close = TOLERANCE if scenario.endswith("float32") else 1e-12
        assert result["scores"] < close * max(1.0, result["score"])
        assert result["gradients"] < close * max(1.0, result["gradient"])
        if not scenario.endswith(("silent", "brief")):
            assert result["numbers"] > 20
            assert result["gradient"] > 0.1


@pytest.mark.parametrize(
    ("family", "way", "sees"),
    [
        *((family, way, (True, True)) for family in FAMILIES for way in WAYS),
        ("qwen3_vl", "trained", (True, False)),
        ("qwen3_vl", "trained", (False, False)),
        # More processes than the models have heads.
        ("qwen2_5_vl", "trained", (True, False, True, True)),
        ("qwen3_vl", "recomputed", (True, False, True, True)),
    ],
)
def test_shared_micro_batches_that_see(together, families, family, way, sees):
    for result in together(len(sees), see_together, families[family], way, sees):
        assert result["numbers"] >= 12
        assert result["gradient"] > 0.1
        assert result["scores"] < 1e-12
        assert result["gradients"] < 1e-11 * max(1.0, result["gradient"])


@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        ("dense", 2, "sequence"), ("dense", 2, "tensor"),
        ("four_heads", 4, "sequence"), ("four_heads", 4, "both"),
        ("one_head", 2, "sequence"), ("two_heads", 4, "sequence"), ("one_left", 4, "both"),
        ("qwen3_moe_2", 2, "expert"),
        ("qwen3_moe_4", 4, "expert"), ("qwen3_moe_4", 4, "pairs"), ("qwen3_moe_4", 4, "mixed"),
    ],
)  # fmt: skip
def test_each_keeps_a_share_of_a_rollouts_activations(measured, kind, ranks, layout):
    """The share is as planned, but for what is kept to bring scores to their owner.

    The plan is of the rank that keeps most: those that share queries read more or fewer keys.
    """
    results = measured(kind, ranks, f"{layout}_kept")
    most = max(result["together"] for result in results)
    least = 0.95 if "moe" in kind else 0.8  # an even load is the same for all
    assert most == pytest.approx(results[0]["planned"], rel=0.05)
    assert all(result["together"] > least * most for result in results)
    assert all(result["sent"] == result["formula"] for result in results)


def test_gathered_keys_are_not_kept_where_layers_are_recomputed(measured):
    """A share of layers' inputs is, and masks, and what brings scores to their owner.

    Keys and values of one layer alone would be nearly half as much again.
    """
    for result in measured("two_heads", 4, "sequence_kept_recomputed"):
        assert result["together"] == pytest.approx(result["share"], rel=0.15)


@pytest.mark.parametrize(
    ("kind", "scenario"), [("dense", "tensor_peak"), ("qwen3_moe_2", "expert_peak")]
)
def test_an_update_takes_the_memory_that_is_planned(measured, kind, scenario):
    """The most memory of four ranks depends on their distance: see ``benchmarks.parallel``."""
    results = measured(kind, 2, scenario)
    most = max(result["measured"] for result in results)
    assert most == pytest.approx(results[0]["planned"], rel=0.05)
