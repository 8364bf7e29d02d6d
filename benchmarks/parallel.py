"""Do processes that compute packs together get what one gets, and what do they send and keep?

    python -m benchmarks.parallel [--ranks 2 4] [--models qwen2 two_heads] [--save]

``ShardedStrategy(sequence=n)``, ``tensor=2`` and both, for tiny random models of two kinds, over
gloo, in float64 and once in float32; and for three that have fewer heads than that takes: with
``one_head`` two ranks, and with ``two_heads`` two pairs of ranks, share queries, and so do those
that have the ``one_left`` after matrices are shared. Of each feature: the largest difference of
scores (logprobs, entropies, values) and of gradients, relative to the largest of them or to 1,
between packs that one process computes and those that several compute together. Each rank has packs
of its own, with shared prompts, tokens that nobody wrote, and penalties; in ``one_silent`` a rank
has nothing to train on, and in ``brief`` there are fewer tokens than ranks. Then, in float32, of
one rollout: bytes that autograd keeps on a rank, against what ``lightning-rl check`` plans, and
bytes that a rank sends in both passes, against the formulas of Ulysses, of gathered keys and of
Megatron-LM. And of a whole update: the most that a rank has allocated at a time, against the plan.

The last line is JSON: ``layouts``, how many (model, processes, layout, feature) were compared;
``equal``, how many of them are within 1e-12 (in float32 within 3e-6: one process is 1.3e-6 from
its own float64); ``max_difference``, in float64; ``memory_plan_error``, the largest of any layout.
"""

import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.parallel_ranks import FEATURES
from benchmarks.results import parser_of, report
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.tiny_models import save_random_model
from tests.support.two_ranks import run_two


class Model(NamedTuple):
    """A kind of model, its sizes, and the layouts that it is tried in, by the number of ranks."""

    kind: type[PretrainedConfig]
    sizes: dict[str, int]
    layouts: dict[int, list[str]]


def _heads(query: int, key: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key}


_ALL = {2: ["sequence", "tensor"], 4: ["sequence", "tensor", "both"]}
MODELS = {
    "qwen2": Model(Qwen2Config, _heads(4, 2), _ALL),
    "qwen3": Model(Qwen3Config, _heads(4, 2) | {"head_dim": 16}, _ALL),
    "one_head": Model(Qwen2Config, _heads(1, 1), {2: ["sequence"]}),
    "two_heads": Model(Qwen2Config, _heads(2, 1), {4: ["sequence"]}),
    "one_left": Model(Qwen3Config, _heads(2, 2) | {"head_dim": 16}, {4: ["both"]}),
}
CLOSE, CLOSE_IN_FLOAT32 = 1e-12, 3e-6


def measured(name: str, ranks: int, folder: Path) -> dict[str, dict[str, float]]:
    """Of a model on so many ranks: what each scenario found, the largest of all ranks."""
    kind, heads, layouts = MODELS[name]
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}
    save_random_model(folder / "model", make_tokenizer(), kind, **sizes, **heads)
    wanted = [
        f"{layout}_{what}" for layout in layouts[ranks] for what in (*FEATURES, "kept", "peak")
    ]
    results = run_two("benchmarks.parallel_ranks", folder / "model", folder, *wanted, ranks=ranks)
    found = {}
    for scenario in wanted:
        rows = results(scenario)
        found[scenario] = {key: max(row[key] for row in rows) for key in rows[0]}
    return found


def _bound(name: str) -> float:
    return CLOSE_IN_FLOAT32 if name.endswith("float32") else CLOSE


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    arguments = parser.parse_args()
    off: dict[str, float] = {}
    plan: dict[str, float] = {}
    print(f"{'model':<11}{'ranks':<7}{'layout':<10}{'feature':<12}{'scores':>10}{'gradients':>11}")
    for name, ranks in product(arguments.models, arguments.ranks):
        if ranks not in MODELS[name].layouts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measured(name, ranks, Path(folder))
        for layout in MODELS[name].layouts[ranks]:
            begin = f"{name:<11}{ranks:<7}{layout:<10}"
            for feature in FEATURES:
                row = found[f"{layout}_{feature}"]
                scores = row["scores"] / max(1.0, row["score"])
                gradients = row["gradients"] / max(1.0, row["gradient"])
                off[f"{name}/{ranks}/{layout}/{feature}"] = max(scores, gradients)
                print(f"{begin}{feature:<12}{scores:>10.1e}{gradients:>11.1e}")
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
    result = {
        "layouts": len(off),
        "equal": sum(value < _bound(name) for name, value in off.items()),
        "max_difference": max(v for name, v in off.items() if _bound(name) == CLOSE),
        "memory_plan_error": max(plan.values()),
        "differences": off,
        "plan_errors": plan,
    }
    report("parallel", result, arguments.save)


if __name__ == "__main__":
    main()
