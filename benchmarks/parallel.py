"""Do processes that compute packs together get what one gets, and what do they send and keep?

    python -m benchmarks.parallel [--ranks 2 4] [--models qwen3 two_heads qwen3_moe] [--save]

``ShardedStrategy(sequence=n)``, ``tensor=2`` and both, for tiny random models of two kinds, and for
three that have fewer heads than that takes: with ``one_head`` two ranks, and with ``two_heads`` two
pairs of ranks, share queries, and so do those that have the ``one_left`` after matrices are shared.
And ``expert=n``, ``expert=2`` and ``sequence=n`` with it for two kinds of mixtures. All over gloo,
in float64 and once in float32. Of each feature: the largest difference of scores (logprobs,
entropies, values) and of gradients, relative to the largest of them or to 1, between packs that one
process computes and those that several compute together. Each rank has packs of its own, with
shared prompts, tokens that nobody wrote, and penalties; in ``one_silent`` a rank has nothing to
train on, in ``brief`` there are fewer tokens than ranks, and in ``idle`` tokens choose experts of
one rank only. Then, in float32, of one rollout: bytes that autograd keeps on a rank, against what
``lightning-rl check`` plans, and bytes that a rank sends in both passes, against the formulas of
Ulysses, of gathered keys, of Megatron-LM and of GShard, the last at an even load.
And of a whole update: the most that a rank has allocated at a time, against the plan.

The last line is JSON: ``layouts``, how many (model, processes, layout, feature) were compared;
``equal``, how many of them are within 1e-12, and in float32 at most three times as far from
float64's gradients as one process is; ``max_difference``, in float64; ``memory_plan_error``, the
largest of any layout.
"""

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.parallel_ranks import FEATURES, OF_MIXTURES, measure
from benchmarks.results import parser_of, report, write_block
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.mixtures import saved_mixture
from tests.support.ranks import World
from tests.support.tiny_models import save_random_model

PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
Saved = Callable[[Path], Path]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}


class Kind(NamedTuple):
    """A kind of model: how one is saved, and what is compared of it."""

    save: Saved
    features: tuple[str, ...]
    layouts: dict[int, list[str]]
    """By the number of processes."""


_ALL = {2: ["sequence", "tensor"], 4: ["sequence", "tensor", "both"]}


def dense(
    kind: type[PretrainedConfig], heads: int, keys: int, layouts: dict[int, list[str]], **sizes: int
) -> Kind:
    """A model that has no experts, with so many heads."""
    counts = {"num_attention_heads": heads, "num_key_value_heads": keys}

    def save(directory: Path) -> Path:
        save_random_model(directory, make_tokenizer(), kind, **SIZES, **counts, **sizes)
        return directory

    return Kind(save, FEATURES, layouts)


def mixture(kind: str) -> Kind:
    """A mixture of experts."""
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
CLOSE, TIMES_ROUNDING = 1e-12, 3.0


def measured(name: str, ranks: int, folder: Path) -> dict[str, dict[str, float]]:
    """Of a model on so many ranks: what each scenario found, the largest of all ranks."""
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
    """Differences of scores and of gradients, to the largest of them or to 1."""
    return row["scores"] / max(1.0, row["score"]), row["gradients"] / max(1.0, row["gradient"])


def times_rounding(row: dict[str, float]) -> float:
    """How much further from float64's gradients those computed together are than one process's."""
    return row["rounding_together"] / row["rounding"]


NAMES = {
    "sequence": "`sequence: n`",
    "tensor": "`tensor: 2`",
    "both": "`sequence: 2, tensor: 2`",
    "expert": "`expert: n`",
    "pairs": "`expert: 2` of four",
    "mixed": "`sequence: n, expert: 2`",
}


def table(result: dict[str, Any]) -> list[str]:
    """Of each layout the largest differences of all models, processes and features."""
    lines = [
        "| Layout | Compared | Differences, float64 | float32 | Kept, plan off by "
        "| At most, plan off by |",
        "|---|---|---|---|---|---|",
    ]
    for layout, name in NAMES.items():
        off, plan = (_of_layout(layout, result[key]) for key in ("differences", "plan_errors"))
        half = {key for key in off if key.endswith("float32")}
        most = max(value for key, value in off.items() if key not in half)
        rounded = max(off[key] for key in half)
        kept, peak = (
            max(value for key, value in plan.items() if key.endswith(what))
            for what in ("kept", "peak")
        )
        lines.append(
            f"| {name} | {len(off)} | {most:.1e} | {rounded:.1e} | {kept:.1%} | {peak:.1%} |"
        )
    return lines


def _of_layout(layout: str, values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if key.split("/")[2] == layout}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", choices=KINDS, nargs="+", default=list(KINDS))
    arguments = parser.parse_args()
    off: dict[str, float] = {}
    of_rounding: dict[str, float] = {}
    plan: dict[str, float] = {}
    print(f"{'model':<11}{'ranks':<7}{'layout':<10}{'feature':<12}{'scores':>10}{'gradients':>11}")
    for name, ranks in product(arguments.models, arguments.ranks):
        if ranks not in KINDS[name].layouts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measured(name, ranks, Path(folder))
        for layout in KINDS[name].layouts[ranks]:
            begin = f"{name:<11}{ranks:<7}{layout:<10}"
            for feature in KINDS[name].features:
                row, key = found[f"{layout}_{feature}"], f"{name}/{ranks}/{layout}/{feature}"
                scores, gradients = relative(row)
                told = f"{begin}{feature:<12}{scores:>10.1e}{gradients:>11.1e}"
                off[key] = max(scores, gradients)
                if "rounding" in row:
                    of_rounding[key] = times_rounding(row)
                    told += f", {of_rounding[key]:.2f} times as far from float64 as one process"
                print(told)
            kept, peak = found[f"{layout}_kept"], found[f"{layout}_peak"]
            plan[f"{name}/{ranks}/{layout}/kept"] = abs(kept["planned"] / kept["together"] - 1)
            plan[f"{name}/{ranks}/{layout}/peak"] = abs(peak["planned"] / peak["measured"] - 1)
            print(
                f"{begin}a rollout: {kept['together']:,.0f} bytes kept, planned "
                f"{kept['planned']:,.0f}; {kept['sent']:,.0f} sent, formula {kept['formula']:,.0f}"
            )
            print(
                f"{begin}an update: {peak['measured']:,.0f} bytes at most, planned "
                f"{peak['planned']:,.0f}"
            )
    exact = [value for key, value in off.items() if key not in of_rounding]
    result = {
        "layouts": len(off),
        "equal": sum(value < CLOSE for value in exact)
        + sum(times < TIMES_ROUNDING for times in of_rounding.values()),
        "max_difference": max(exact),
        "max_times_rounding": max(of_rounding.values()),
        "memory_plan_error": max(plan.values()),
        "differences": off,
        "plan_errors": plan,
    }
    if arguments.save:
        write_block(PAGE, "parallel", table(result))
    report("parallel", result, arguments.save)


if __name__ == "__main__":
    main()
