"""Compute accuracies, gains and tables, from what runs and exams have left."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.small_model.runs import FULL, ITERATIONS, LORA, LR, RUNS, TRAINED, TRL
from recipes.smollm2.tasks import TASKS

FIVES = (0, 5, 10, 15, 25, 35)
"""The iterations at which the blocks of five begin whose rewards are shown."""
STUDENT_T = 4.303
"""The 0.975 quantile of Student's t with two degrees of freedom: three seeds."""


def accuracy(one: Mapping[str, Any], tasks: Sequence[str] = TRAINED) -> float:
    """Return the share of right answers; each task counts as much."""
    return fmean(fmean(one["right"][task]) for task in tasks)


def gain(before: Mapping[str, Any], after: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the gain in accuracy, and half of its 95 % interval over questions and seeds.

    The half is the root of the sum of two squares: 1.96 standard errors over questions (of a
    question's gain, which is averaged over seeds), and Student's t of the mean over three seeds.
    """
    first = [right for task in TRAINED for right in before["right"][task]]
    last = [[right for task in TRAINED for right in one["right"][task]] for one in after]
    of_question = [fmean(rights) - right for right, *rights in zip(first, *last, strict=True)]
    of_seed = [fmean(rights) - fmean(first) for rights in last]
    over_questions = 1.96 * stdev(of_question) / math.sqrt(len(of_question))
    over_seeds = STUDENT_T * stdev(of_seed) / math.sqrt(len(of_seed))
    return fmean(of_question), math.hypot(over_questions, over_seeds)


def tasks_table(found: Mapping[str, Any]) -> list[str]:
    """Return a row per task: the untrained model, also greedily and at length, and each seed."""
    titles = {
        "untrained": "untrained",
        "untrained-long": "untrained, greedy, 256 tokens",
        **{name: f"seed {one['seed']}" for name, one in FULL.items()},
        **dict.fromkeys(LORA, "a LoRA"),
        TRL: "TRL",
    }
    exams = {title: found[name] for name, title in titles.items() if name in found}
    lines = [row(["task", *exams]), row(["---"] * (1 + len(exams)))]
    rows = {f"`{task}`": [task] for task in TRAINED} | {"**all five**": TRAINED}
    rows |= {f"`{task}`, not trained on": [task] for task in TASKS if task not in TRAINED}
    for title, tasks in rows.items():
        lines.append(row([title, *(f"{accuracy(exam, tasks):.2f}" for exam in exams.values())]))
    lines.append(row(["tokens of an answer", *(f"{e['tokens']:.0f}" for e in exams.values())]))
    lines.append(row(["cut off", *(f"{exam['cut_off']:.0%}" for exam in exams.values())]))
    return lines


def rates_table(found: Mapping[str, Any]) -> list[str]:
    """Return a row per way to train and learning rate, all of seed 0: rewards in training."""
    titles = ["trained", "learning rate", *(f"iterations {a + 1}-{a + 5}" for a in FIVES)]
    lines = [row(titles), row(["---"] * len(titles))]
    ways = {name: one for name, one in RUNS.items() if not one.get("seed")} | {TRL: {"lr": LR}}
    known = [item for item in ways.items() if item[0] in found]
    for name, one in sorted(known, key=lambda way: (way[0][:4], way[1]["lr"])):
        what = "TRL, all weights" if name == TRL else "a LoRA" if "lora" in one else "all weights"
        rewards = found[name]["rewards"]
        fives = (rewards[a : a + 5] for a in FIVES)
        cells = [f"{fmean(five):.2f}" if five else "" for five in fives]
        lines.append(row([what, f"{one['lr']:.0e}", *cells]))
    return lines


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def curves(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a seed's accuracy in training for the figure, as the mean of five iterations."""
    return [
        {
            "seed": one["seed"],
            "iterations": list(range(5, ITERATIONS + 1, 5)),
            "accuracy": [
                fmean(found[name]["rewards"][i - 5 : i]) for i in range(5, ITERATIONS + 1, 5)
            ],
        }
        for name, one in FULL.items()
    ]


def summary_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the last line."""
    before, after = found["untrained"], [found[name] for name in FULL]
    mean, half = gain(before, after)
    ours, trl = found["full-0"]["cpu_s"], found[TRL]["cpu_s"]
    return {
        "accuracy_before": accuracy(before),
        "accuracy_after": fmean(map(accuracy, after)),
        "gain": mean,
        "interval_low": mean - half,
        "interval_high": mean + half,
        "accuracy_trl": accuracy(found[TRL]),
        "seconds_over_trl": sum(ours) / sum(trl),
        "seconds_over_trl_first_20": sum(ours[:20]) / sum(trl[:20]),
        "tasks": {
            task: {
                "before": accuracy(before, [task]),
                "after": fmean(accuracy(one, [task]) for one in after),
            }
            for task in TASKS
        },
        "runs": {
            name: {key: value for key, value in one.items() if key != "right"}
            | ({"accuracy": {t: accuracy(one, [t]) for t in TASKS}} if "right" in one else {})
            for name, one in found.items()
        },
    }
