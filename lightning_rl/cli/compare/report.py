"""The report of a comparison: a table, verdicts in words, a picture, a page and a JSON file."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from statistics import fmean
from typing import Any

from lightning_rl.cli.compare.comparison import ERROR, Comparison
from lightning_rl.cli.compare.intervals import MOST_PAIRS, Interval, pairs_needed
from lightning_rl.cli.series import as_table
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import read_run
from lightning_rl.run.files.rundir import write_whole
from lightning_rl.run.files.strict_json import dumps

RESULT, PICTURE, PAGE = "compare.json", "compare.svg", "view.html"
_ROLLOUTS = 100  # of each run in the page


def table(comparison: Comparison) -> str:
    """Return a line for each configuration with a run that has ended; "" without any."""
    names = [comparison.base, *comparison.others]
    rows = [_row(comparison, name) for name in names if comparison.seeds_of(name)]
    return as_table(rows) if rows else ""


def verdicts(comparison: Comparison) -> Iterator[str]:
    """Yield what is known about each configuration, in words."""
    yield from (verdict(comparison, other) for other in comparison.others)
    if (count := len(comparison.others)) > 1:
        yield (
            f"Each interval has the level {1 - comparison.error:.4g}, so that all {count} hold at "
            f"once with probability {1 - ERROR:g} (Bonferroni)."
        )


def verdict(comparison: Comparison, other: str) -> str:
    """Return what is known about a configuration and the base, in words."""
    interval, question, base = comparison.interval(other), comparison.question, comparison.base
    if interval.decided:
        decision = question.decision(interval)
        return f"{other} {decision} {base}: decided after {interval.pairs} pairs."
    so_far = f"{other} and {base}: undecided after {interval.pairs} pairs"
    return f"{so_far}{_outlook(interval, comparison.error)}."


def _outlook(interval: Interval, error: float) -> str:
    if interval.pairs < 2:
        return ""
    if not interval.spread:
        return (
            ", whose differences are all equal; if a seed is set in data or model, remove it, and "
            "if the metric is coarse, evaluate on more prompts"
        )
    needed = pairs_needed(interval.mean, interval.spread, error)
    count = f"more than {MOST_PAIRS}" if needed is None else f"about {needed}"
    return f"; if mean and spread stay as they are, {count} pairs would decide it"


def write(comparison: Comparison) -> None:
    """Write the result as JSON, the picture, and the page with the curves of all runs."""
    folder, names = comparison.runs.folder, [comparison.base, *comparison.others]
    result = {
        "metric": comparison.question.metric,
        "asks": comparison.question.difference_is,
        "base": comparison.base,
        "level": 1 - ERROR,
        "level_of_each": 1 - comparison.error,
        "runs": [
            {"configuration": name, "seed": seed} | asdict(comparison.outcome(name, seed))
            for name in names
            for seed in comparison.seeds_of(name)
        ],
        "comparisons": [
            {"configuration": other, "decided": comparison.interval(other).decided}
            | asdict(comparison.interval(other))
            | {"differences": comparison.differences(other), "verdict": verdict(comparison, other)}
            for other in comparison.others
        ],
    }
    write_whole(folder / RESULT, dumps(result, indent=2) + "\n")
    draw(comparison).savefig(folder / PICTURE)
    directories = [comparison.runs.directory(n, s) for n in names for s in comparison.seeds_of(n)]
    write_whole(folder / PAGE, build_page([read_run(path, _ROLLOUTS) for path in directories]))


def draw(comparison: Comparison) -> Any:
    """Return a matplotlib ``Figure``: the difference of each pair, and the interval after it."""
    # The object interface: pyplot would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6 * len(comparison.others)), layout="constrained")
    panels = figure.subplots(len(comparison.others), 1, squeeze=False)[:, 0]
    for axes, other in zip(panels, comparison.others, strict=True):
        found = comparison.differences(other)
        numbers = range(1, len(found) + 1)
        intervals = [Interval.of(found[:number], comparison.error) for number in numbers]
        bounded = [one for one in intervals if math.isfinite(one.high)]
        ends = [one.high - one.mean for one in bounded]
        at = [one.pairs for one in bounded], [one.mean for one in bounded]
        axes.errorbar(*at, yerr=ends, fmt="none", capsize=5, label="interval")
        axes.plot(numbers, [one.mean for one in intervals], label="mean so far")
        axes.plot(numbers, found, "o", label="pair")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(f"{other} and {comparison.base}", fontsize="medium")
        axes.set_ylabel(comparison.question.difference_is, fontsize="small")
        axes.legend(fontsize="small")
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("pairs")
    return figure


def _row(comparison: Comparison, name: str) -> dict[str, Any]:
    outcomes = [comparison.outcome(name, seed) for seed in comparison.seeds_of(name)]
    row: dict[str, Any] = {"configuration": name, "runs": len(outcomes)}
    row |= comparison.question.summed_up(outcomes)
    if name != comparison.base and (interval := comparison.interval(name)).pairs:
        row |= comparison.question.compared(interval)
    seconds = {"wall_s": [o.wall_s for o in outcomes], "cpu_s": [o.cpu_s for o in outcomes]}
    return row | {key: round(fmean(values), 1) for key, values in seconds.items()}
