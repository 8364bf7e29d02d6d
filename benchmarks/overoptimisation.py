"""Does a policy that learns from a reward model get better by what the model was trained on?

    OMP_NUM_THREADS=1 python -m benchmarks.overoptimisation [--save]

Gao et al. 2022 (arXiv:2210.10760) on sort_digits: pairs of answers of the untrained policy are
judged by a gold reward, the share of places that hold the right digit. A reward model learns from
these, and GRPO maximises what it says. The gold reward is measured beside it, at weight 0, and the
distance from the initial policy, sqrt(KL), with the KL per answer estimated from the rollouts.
"""

import tempfile
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.support import task
from benchmarks.support.results import parser_of, report_on
from lightning_rl import HFExport, K3Penalty, ModelReward, ModelTeacher, RLDataModule, WeightSync
from lightning_rl.callbacks import LearningAlarms, RLCallback
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.learn.reward_model import RewardModelModule, RewardPairDataModule

SEEDS, PAIRS, HELD_OUT, EPOCHS, ITERATIONS, LR, WINDOW = 2, 64, 256, 8, 30, 2e-4, 3
ARMS = {"no penalty": None, "`K3Penalty(0.3)`": K3Penalty(0.3)}
PAGE = Path(__file__).parents[1] / "docs" / "rewards.md"


def gold(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [
        sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
        for said, right in zip(completions, answer, strict=True)
    ]


class Meter(RLCallback):
    """Keeps a row per iteration: both rewards, and how far the policy is from its start."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._start = ModelTeacher(str(task.MODEL))

    def on_collect_end(self, trainer: Any, pl_module: Any, rollouts: list[Any]) -> None:
        # The mean of log q - log p over an answer's tokens, as a teacher scores: minus a KL.
        gaps: list[Any] = self._start(rollouts)
        kl = fmean(-gap * sum(r.loss_mask) for r, gap in zip(rollouts, gaps, strict=True))
        parts = {n: fmean(r.reward_parts[n] or 0.0 for r in rollouts) for n in ("gold", "model")}
        self.rows.append(parts | {"distance": max(0.0, kl) ** 0.5})
        for row in chain(*(rollout.rows for rollout in rollouts)):
            row.teacher_logprobs = ""  # it was measured, and nothing is learned from it


def learned_judge(engine: Any, directory: str, seed: int) -> float:
    """Train a reward model into ``directory``; return its accuracy on held-out pairs."""
    data = task.make_data(1, engine, reward=gold, seed=seed)
    drawn = data.peek(task.make_module(seed=seed), 4 * (PAIRS + HELD_OUT), 2).rollouts
    both = zip(drawn[::2], drawn[1::2], strict=True)
    pairs = [
        {"prompt": a.prompt.prompt, "chosen": b.token_ids, "rejected": a.token_ids}
        for a, b in (sorted(pair, key=lambda r: r.reward or 0.0) for pair in both)
        if a.reward != b.reward
    ]
    torch.manual_seed(seed)
    adamw = partial(torch.optim.AdamW, lr=1e-4)
    module = RewardModelModule(str(task.MODEL), centering=0.01, optimizer=adamw)
    parts = IterablePrompts(pairs[:PAIRS]), IterablePrompts(pairs[PAIRS : PAIRS + HELD_OUT])
    rows = RewardPairDataModule(*parts, batch_size=16, seed=seed)
    trainer = task.quiet_trainer(directory, [HFExport(directory)], max_epochs=EPOCHS)
    trainer.fit(module, rows)
    return float(trainer.callback_metrics["rm/val_accuracy"])


def run_arm(engine: Any, judge: str, penalty: K3Penalty | None, seed: int) -> dict[str, Any]:
    """Train the policy by what the reward model says, and measure what it is worth."""
    rewards: list[Any] = [ModelReward(judge, name="model", batch_size=64), gold]
    data = RLDataModule(
        task.make_prompts(seed=seed), rewards, engine, reward_weights=[1.0, 0.0],
        sampling=task.SAMPLING, group_size=task.GROUP_SIZE, groups_per_iteration=task.GROUPS,
        iterations_per_epoch=ITERATIONS, seed=seed,
    )  # fmt: skip
    alarms, meter = LearningAlarms(), Meter()
    module = task.make_module(lr=LR, minibatches=2, seed=seed, kl=penalty)
    task.fit(module, data, [WeightSync(), alarms, meter], logs=False)
    return {"rows": meter.rows, "alarm": alarms.told.get("gaming")}


def curve(runs: list[dict[str, Any]], name: str, window: int = WINDOW) -> list[float]:
    """Return the mean over the runs and over a window of iterations, for each such window."""
    iterations = zip(*(run["rows"] for run in runs), strict=True)
    means = [fmean(row[name] for row in rows) for rows in iterations]
    return [fmean(means[i : i + window]) for i in range(len(means) - window + 1)]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return both rewards in iteration 1, at the peak of the gold one, and at the end."""
    curves = {name: curve(runs, name) for name in ("gold", "model", "distance")}
    peak = curves["gold"].index(max(curves["gold"]))
    found = {f"{name}_peak": values[peak] for name, values in curves.items()}
    found |= {f"{name}_end": values[-1] for name, values in curves.items()}
    found |= {"gold_start": curve(runs, "gold", 1)[0], "peak_iteration": peak + (WINDOW + 1) // 2}
    return found | {"alarms": [run["alarm"] for run in runs]}


def draw(arms: dict[str, Any], path: Path) -> None:
    """Draw both rewards over the distance from the initial policy, a line per arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("gold", "model"), strict=True):
        for arm, runs in arms.items():
            axes.plot(curve(runs, "distance"), curve(runs, name), label=arm.strip("`"))
        axes.set(title=f"{name} reward", xlabel="distance from the initial policy, √KL")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path)


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown, an arm a line."""
    head = "gold at the start | at its peak | at the end | the model's at its peak | at the end"
    row = (
        "| {} | {gold_start:.2f} | {gold_peak:.2f} (iteration {peak_iteration}) | {gold_end:.2f} "
        "| {model_peak:.2f} | {model_end:.2f} |"
    )
    rows = [row.format(arm, **found) for arm, found in result["arms"].items()]
    return [f"| | {head} |", "|---|---|---|---|---|---|", *rows]


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    task.prepare()
    engine, accuracies = task.KeptEngine(max_model_len=32), []
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as judge:
            accuracies.append(learned_judge(engine, judge, seed))
            for arm, penalty in ARMS.items():
                runs[arm].append(run_arm(engine, judge, penalty, seed))
    engine.end()
    arms = {arm: summary(found) for arm, found in runs.items()}
    result = {"judge_accuracy": accuracies, "arms": arms, "runs": runs}
    if arguments.save:
        draw(runs, PAGE.parent / "images" / "overoptimisation.svg")
    report_on(PAGE, "overoptimisation", result, table(result), arguments.save)


if __name__ == "__main__":
    main()
