"""Measure what LengthReward does to SmolLM2's answers: how many are right, and how long they are.

    python -m benchmarks.brief [--iterations 16] [--seeds 0 1 2] [--save]

Trains recipes/smollm2/grpo.yaml as it is and with its variant brief.yaml, which also pays right
answers for being short, with three seeds each. All are evaluated on the same held-out questions, as
often as in the recipe. A run takes about ten minutes of one core; what is done stays in
runs/brief: delete a folder to measure it again.

The last line is JSON: held-out accuracy and tokens of an answer before and after, the means over
seeds, and both of each seed. ``--save`` also keeps it in benchmarks/results, and the table in
docs/rewards.md.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.small_model.figures import row
from benchmarks.small_model.runs import DATA, configs, run
from benchmarks.support.results import parser_of, report_on
from recipes.smollm2.prepare import prepare
from recipes.smollm2.weights import fetch

OUT = Path("runs/brief")
PAGE = Path(__file__).parents[1] / "docs" / "rewards.md"
WAYS = {
    "plain": ("right alone", ["grpo.yaml"]),
    "brief": ("and `LengthReward`, with weight 0.25", ["grpo.yaml", "variants/brief.yaml"]),
}
Numbers = dict[str, float]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    fetch(DATA / "model")
    prepare(DATA)
    seeds, iterations = arguments.seeds, arguments.iterations
    # Seed by seed, so that what is measured so far can be compared.
    runs = [{way: measured(way, seed, iterations) for way in WAYS} for seed in seeds]
    before = runs[0]["plain"]["before"]
    result: dict[str, Any] = {"before": before, "iterations": iterations, "seeds": len(seeds)}
    for way in WAYS:
        ends = [of_seed[way]["after"] for of_seed in runs]
        result[way] = {name: fmean(end[name] for end in ends) for name in before}
        result[way]["of_seeds"] = ends
    print("\n".join(table(result)))
    report_on(PAGE, "brief", result, table(result), arguments.save)


def measured(way: str, seed: int, iterations: int) -> dict[str, Numbers]:
    """Return held-out accuracy and tokens before and after a training, run if it was not yet."""
    name = f"{way}-{seed}"
    directory = OUT / name / "version_0"
    if not (directory / "hf" / "config.json").exists():
        options: list[tuple[str, object]] = [
            *configs(WAYS[way][1]),
            ("--seed_everything", seed),
            ("--data.iterations_per_epoch", iterations),
            ("--trainer.logger.save_dir", OUT),
            ("--trainer.logger.name", name),
            *([("--ckpt_path", "last")] if directory.exists() else []),  # it was stopped
        ]
        run([sys.executable, "-m", "lightning_rl", "fit"], options)
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [one for one in map(json.loads, lines) if "eval/accuracy" in one]
    return {"before": _numbers(rows[0]), "after": _numbers(rows[-1])}


def _numbers(metrics: dict[str, float]) -> Numbers:
    return {"accuracy": metrics["eval/accuracy"], "tokens": metrics["eval/tokens_mean"]}


def table(result: dict[str, Any]) -> list[str]:
    """Return a row per way to train: held-out accuracy and tokens, mean and each seed."""
    lines = [row(["rewards", "accuracy", "tokens of an answer"]), row(["---"] * 3)]
    before = result["before"]
    cells = [f"{before['accuracy']:.2f}", f"{before['tokens']:.1f}"]
    lines.append(row(["untrained", *cells]))
    for way, (title, _) in WAYS.items():
        mean, ends = result[way], result[way]["of_seeds"]
        shown = ", ".join(f"{end['accuracy']:.2f}" for end in ends)
        lengths = ", ".join(f"{end['tokens']:.1f}" for end in ends)
        cells = [f"{mean['accuracy']:.2f} ({shown})", f"{mean['tokens']:.1f} ({lengths})"]
        lines.append(row([title, *cells]))
    return lines


if __name__ == "__main__":
    main()
