"""Does a guard keep a run with a mismatched engine from degrading?

    OMP_NUM_THREADS=1 python -m benchmarks.guards [--save] [--plot docs/images/guards.png]

GRPO on sort_digits with real vLLM, set up to go wrong: the engine holds bfloat16 weights, gets new
ones only every 8th iteration, and the learning rate is three times the recipe's. All arms have the
same prompts, seeds and engine; they differ in what `LogprobGapGuard` does when the mean gap between
the engine's and the trainer's logprobs exceeds its bound. `synced` is what the same engine and
learning rate come to with a sync in every iteration. Held-out accuracy is greedy, and is measured
right after a sync, so of the trainer's own weights (in bfloat16). The last line is JSON; `--save`
also writes the table into docs/guards.md.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.schedulers.real import Clock
from benchmarks.support.results import parser_of, report_on
from benchmarks.support.task import OUT, KeptEngine, fit, make_data, make_module, prepare
from lightning_rl import (
    Evaluate,
    Evaluation,
    FixedSchedule,
    JSONLPrompts,
    Sampling,
    VLLMLocal,
    WeightSync,
)
from lightning_rl.callbacks import Correct, GuardAction, LogprobGapGuard, Mask, SkipUpdate, Warn

LR = 5e-4  # the recipe's is 1.5e-4
SYNC_EVERY, ITERATIONS = 8, 24
BOUND = 0.1
ARMS: dict[str, tuple[Callable[[], GuardAction], int]] = {
    "unguarded": (Warn, SYNC_EVERY),
    "SkipUpdate": (SkipUpdate, SYNC_EVERY),
    "Correct": (Correct, SYNC_EVERY),
    "Mask": (Mask, SYNC_EVERY),
    "synced": (Warn, 1),
}

PAGE = Path(__file__).parents[1] / "docs" / "guards.md"

Curve = list[tuple[int, float]]


def run_arm(engine: VLLMLocal, arm: str, seed: int) -> dict[str, Any]:
    """Run once; return held-out accuracy by iteration, logprob gaps, and how often it acted."""
    make, sync_every = ARMS[arm]
    data = make_data(
        ITERATIONS,
        engine,
        seed=seed,
        evaluation=Evaluation(
            JSONLPrompts(str(OUT / "heldout.jsonl")),
            sampling=Sampling(max_tokens=10, temperature=0.0),
            limit=128,
        ),
    )
    clock, begin = Clock(), time.process_time()
    callbacks = [
        WeightSync(schedule=FixedSchedule(sync_every)),
        Evaluate(every_n_iterations=SYNC_EVERY),
        LogprobGapGuard(BOUND, make()),
        clock,
    ]
    fit(make_module(lr=LR, minibatches=2, seed=seed), data, callbacks, logs=False)
    return {
        "accuracy": _curve(clock, "eval/accuracy"),
        "gap": _curve(clock, "guard/logprob_gap_value"),
        "acted": sum(row.get("guard/logprob_gap_acted", 0.0) for row in clock.rows),
        "cpu_s": time.process_time() - begin,
    }


def _curve(clock: Clock, name: str) -> Curve:
    return [(i, round(row[name], 4)) for i, row in enumerate(clock.rows) if name in row]


def measured(seeds: int) -> dict[str, Any]:
    """Run all arms, seed by seed."""
    prepare()
    engine = KeptEngine(dtype="bfloat16", max_model_len=32)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm in ARMS:
            run = run_arm(engine, arm, seed)
            runs[arm].append(run)
            accuracy = " ".join(f"{value:.2f}" for _, value in run["accuracy"])
            print(f"seed {seed} {arm:>10}: accuracy {accuracy}", flush=True)
    engine.end()
    last = {arm: [run["accuracy"][-1][1] for run in runs[arm]] for arm in ARMS}
    return {
        "accuracy_before": statistics.mean(run["accuracy"][0][1] for run in runs["unguarded"]),
        "accuracy_after": {arm: statistics.mean(values) for arm, values in last.items()},
        "accuracy_after_worst": {arm: min(values) for arm, values in last.items()},
        "accuracy_after_by_seed": last,
        "iterations_acted": {
            arm: statistics.mean(run["acted"] for run in runs[arm]) for arm in ARMS
        },
        "cpu_s": sum(run["cpu_s"] for arm in ARMS for run in runs[arm]),
        "seeds": seeds,
        "iterations": ITERATIONS,
        "sync_every": SYNC_EVERY,
        "lr": LR,
        "bound": BOUND,
        "runs": runs,
    }


def draw(result: dict[str, Any], path: str) -> None:
    """Draw accuracy of every run and the arm's mean, and the gaps that the guard saw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colors = dict(zip(ARMS, ("#c0392b", "#2f6fb0", "#3a9474", "#d9822b", "#9aa5b1"), strict=True))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for arm, runs in result["runs"].items():
        for axes, name in ((left, "accuracy"), (right, "gap")):
            for run in runs:
                x, y = zip(*run[name], strict=True)
                axes.plot(x, y, color=colors[arm], alpha=0.25, linewidth=1)
            places = [place for place, _ in runs[0][name]]
            mean = [statistics.mean(run[name][i][1] for run in runs) for i in range(len(places))]
            axes.plot(places, mean, color=colors[arm], linewidth=2.2, label=arm)
    right.axhline(result["bound"], color="#26323f", linestyle=":", linewidth=1)
    right.text(0.2, result["bound"] * 1.15, "bound", fontsize=9)
    right.set_yscale("log")
    left.set_title(f"Held-out accuracy, {result['seeds']} seeds and their mean")
    right.set_title("Mean logprob gap, engine to trainer (nats)")
    left.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.set_xlabel(f"iteration (a sync every {result['sync_every']}; synced: every one)")
        axes.set_xticks(range(0, result["iterations"] + 1, result["sync_every"]))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown, an arm a line: held-out accuracy over the seeds."""
    names = {"Correct": "`Correct` with `TokenTIS`", "synced": "synced every iteration"}
    lines = ["| arm | accuracy at the start | after, mean | worst seed | best seed |"]
    lines.append("|---|---|---|---|---|")
    for arm, values in result["accuracy_after_by_seed"].items():
        name = names.get(arm, arm if arm == "unguarded" else f"`{arm}`")
        cells = (result["accuracy_before"], statistics.mean(values), min(values), max(values))
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", help="write the figure to this file")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    result = measured(arguments.seeds)
    if arguments.plot:
        draw(result, arguments.plot)
    report_on(PAGE, "guards", result, table(result), arguments.save)


if __name__ == "__main__":
    main()
