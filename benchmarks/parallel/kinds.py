"""Define kinds of models, and what is compared of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.parallel.ranks import FEATURES, OF_MIXTURES, measure
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.mixtures import saved_mixture
from tests.support.ranks import World
from tests.support.tiny_models import save_random_model

Saved = Callable[[Path], Path]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}


class Kind(NamedTuple):
    """A kind of model: how one is saved, and what is compared of it."""

    save: Saved
    features: tuple[str, ...]
    layouts: dict[int, list[str]]
    """The layouts by the number of processes."""


_ALL = {2: ["sequence", "tensor"], 4: ["sequence", "tensor", "both"]}


def dense(
    kind: type[PretrainedConfig], heads: int, keys: int, layouts: dict[int, list[str]], **sizes: int
) -> Kind:
    """Define a model without experts, with so many heads."""
    counts = {"num_attention_heads": heads, "num_key_value_heads": keys}

    def save(directory: Path) -> Path:
        save_random_model(directory, make_tokenizer(), kind, **SIZES, **counts, **sizes)
        return directory

    return Kind(save, FEATURES, layouts)


def mixture(kind: str) -> Kind:
    """Define a mixture of experts."""
    return Kind(
        lambda directory: saved_mixture(kind, directory, num_attention_heads=4),
        OF_MIXTURES,
        {2: ["expert", "mixed"], 4: ["expert", "mixed", "pairs"]},
    )


KINDS = {
    "qwen2": dense(Qwen2Config, 4, 2, _ALL),
    "qwen3": dense(Qwen3Config, 4, 2, _ALL, head_dim=16),
    "one_head": dense(Qwen2Config, 1, 1, {2: ["sequence"]}),
    "two_heads": dense(Qwen2Config, 2, 1, {4: ["sequence"]}),
    "one_left": dense(Qwen3Config, 2, 2, {4: ["both"]}, head_dim=16),
    "qwen3_moe": mixture("qwen3_moe"),
    "mixtral": mixture("mixtral"),
}


def measured(name: str, ranks: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return what each scenario found for a model on so many ranks, the largest of all ranks."""
    model = KINDS[name].save(folder / "model")
    wanted = [
        f"{layout}_{what}"
        for layout in KINDS[name].layouts[ranks]
        for what in (*KINDS[name].features, "kept", "peak")
    ]
    found = {}
    with World(ranks) as world:
        for scenario in wanted:
            rows = world(measure, str(model), scenario)
            found[scenario] = {key: max(row[key] for row in rows) for key in rows[0]}
    return found


def relative(row: dict[str, float]) -> tuple[float, float]:
    """Return differences of scores and of gradients, relative to the largest of them or to 1."""
    return row["scores"] / max(1.0, row["score"]), row["gradients"] / max(1.0, row["gradient"])


def times_rounding(row: dict[str, float]) -> float:
    """Return how many times as far from float64's gradients all ranks are as one process is."""
    return row["rounding_together"] / row["rounding"]
