"""Does a policy that learns from a reward model get better by what the model was trained on?

    OMP_NUM_THREADS=1 python -m benchmarks.overoptimisation [--save] [--plot FILE]

Gao et al. 2022 (arXiv:2210.10760) on sort_digits: a gold reward is known exactly, here the share of
places that hold the right digit. It judges pairs of answers of the untrained policy, a reward model
(`RewardModelModule`) learns from these, and GRPO maximises what the model says (`ModelReward`),
with and without a KL penalty. The gold reward of the same rollouts is measured beside it, at weight
0, where `LearningAlarms` watches it. The distance from the initial policy is sqrt(KL), with the KL
per answer estimated from the rollouts.

The last line is JSON; rewards are means over a window of iterations, and over the seeds. `--save`
also writes the table into docs/rewards.md.
"""

import logging
import math
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.support.colours import INK
from benchmarks.support.results import parser_of, report_on
from benchmarks.support.task import (
    GROUP_SIZE,
    GROUPS,
    MODEL,
    SAMPLING,
    KeptEngine,
    fit,
    make_data,
    make_module,
    make_prompts,
    prepare,
    quiet_trainer,
)
from lightning_rl import (
    HFExport,
    K3Penalty,
    ModelReward,
    ModelTeacher,
    RLDataModule,
    Rollout,
    VLLMLocal,
    WeightSync,
)
from lightning_rl.callbacks import LearningAlarms, RLCallback
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.learn.reward_model import RewardModelModule, RewardPairDataModule

PAIRS, HELD_OUT, EPOCHS = 64, 256, 8
ITERATIONS, LR, WINDOW = 30, 2e-4, 3
ARMS = {"no penalty": 0.0, "`K3Penalty(0.3)`": 0.3}
PAGE = Path(__file__).parents[1] / "docs" / "rewards.md"

Row = dict[str, float]


def gold(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return the share of places, of the longer of both, that hold the digit of the answer."""
    return [
        sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
        for said, right in zip(completions, answer, strict=True)
    ]


class Meter(RLCallback):
    """Keeps a row per iteration: both rewards, and how far the policy is from its start.

    Args:
        start: directory of the initial policy.
        alarms: the run's alarms.
    """

    def __init__(self, start: Path, alarms: LearningAlarms) -> None:
        self.rows: list[Row] = []
        self.alarm: int | None = None
        """The iteration in which the alarm about gaming went off."""
        self._start, self._alarms = ModelTeacher(str(start)), alarms

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        # The mean of log q - log p over an answer's tokens, as a teacher scores: minus a KL.
        gaps: list[Any] = self._start(rollouts)
        kl = fmean(-gap * sum(r.loss_mask) for r, gap in zip(rollouts, gaps, strict=True))
        parts = {n: fmean(r.reward_parts[n] or 0.0 for r in rollouts) for n in ("gold", "model")}
        self.rows.append(parts | {"distance": math.sqrt(max(0.0, kl))})
        for row in (row for rollout in rollouts for row in rollout.rows):
            row.teacher_logprobs = ""  # it was measured, and nothing is learned from it

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        if self.alarm is None and "gaming" in self._alarms.told:
            self.alarm = len(self.rows)


def judged_pairs(engine: VLLMLocal, seed: int) -> list[dict[str, Any]]:
    """Return pairs of answers to one prompt each, of which one has more of the gold reward."""
    data = make_data(1, engine, reward=gold, seed=seed)
    rollouts = data.peek(make_module(seed=seed), 4 * (PAIRS + HELD_OUT), 2).rollouts
    pairs = []
    for one, other in zip(rollouts[::2], rollouts[1::2], strict=True):
        worse, better = sorted((one, other), key=lambda r: r.reward or 0.0)
        if better.reward != worse.reward:
            said = {"chosen": better.token_ids, "rejected": worse.token_ids}
            pairs.append({"prompt": one.prompt.prompt, **said})
    return pairs[: PAIRS + HELD_OUT]


def learned_judge(pairs: list[dict[str, Any]], directory: Path, seed: int) -> float:
    """Train a reward model into ``directory``; return its accuracy on held-out pairs."""
    torch.manual_seed(seed)
    module = RewardModelModule(
        str(MODEL), centering=0.01, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4)
    )
    data = RewardPairDataModule(
        IterablePrompts(pairs[:PAIRS]), IterablePrompts(pairs[PAIRS:]), batch_size=16, seed=seed
    )
    trainer = quiet_trainer(directory, [HFExport(str(directory))], max_epochs=EPOCHS)
    trainer.fit(module, datamodule=data)
    return float(trainer.callback_metrics["rm/val_accuracy"])


def run_arm(engine: VLLMLocal, judge: Path, coef: float, seed: int) -> Meter:
    """Train the policy by what the reward model says, and measure what it is worth."""
    rewards: list[Any] = [ModelReward(str(judge), name="model", batch_size=64), gold]
    data = RLDataModule(
        make_prompts(seed=seed),
        rewards,
        engine,
        reward_weights=[1.0, 0.0],
        sampling=SAMPLING,
        group_size=GROUP_SIZE,
        groups_per_iteration=GROUPS,
        iterations_per_epoch=ITERATIONS,
        seed=seed,
    )
    alarms = LearningAlarms()
    meter = Meter(MODEL, alarms)
    penalty = K3Penalty(coef) if coef else None
    module = make_module(lr=LR, minibatches=2, seed=seed, kl=penalty)
    fit(module, data, [WeightSync(), alarms, meter], logs=False)
    return meter


def measured(seeds: int) -> dict[str, Any]:
    """All arms, seed by seed; each seed has pairs and a reward model of its own."""
    prepare()
    engine = KeptEngine(max_model_len=32)
    begin, accuracies = time.process_time(), list[float]()
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as directory:
            judge = Path(directory)
            accuracies.append(learned_judge(judged_pairs(engine, seed), judge, seed))
            for arm, coef in ARMS.items():
                meter = run_arm(engine, judge, coef, seed)
                found[arm].append({"rows": meter.rows, "alarm": meter.alarm})
                print(f"seed {seed} {arm}: {summary(found[arm][-1:])}", flush=True)
    engine.end()
    return {
        "judge_accuracy": accuracies,
        "arms": {arm: summary(runs) for arm, runs in found.items()},
        "cpu_s": time.process_time() - begin,
        "pairs": PAIRS,
        "runs": found,
    }


def curve(runs: list[dict[str, Any]], name: str, window: int = WINDOW) -> list[float]:
    """Return the mean over the runs and over a window of iterations, for each such window."""
    iterations = zip(*(run["rows"] for run in runs), strict=True)
    means = [fmean(row[name] for row in rows) for rows in iterations]
    return [fmean(means[i : i + window]) for i in range(len(means) - window + 1)]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return both rewards in iteration 1, at the peak of the gold one, and at the end."""
    golds, models, distances = (curve(runs, name) for name in ("gold", "model", "distance"))
    peak = golds.index(max(golds))
    return {
        "gold_start": curve(runs, "gold", 1)[0],
        "gold_peak": golds[peak],
        "peak_iteration": peak + (WINDOW + 1) // 2,
        "distance_peak": distances[peak],
        "gold_end": golds[-1],
        "model_start": curve(runs, "model", 1)[0],
        "model_peak": models[peak],
        "model_end": models[-1],
        "distance_end": distances[-1],
        "alarm_iterations": [run["alarm"] for run in runs],
    }


def draw(result: dict[str, Any], path: str) -> None:
    """Both rewards over the distance from the initial policy, a line per arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"gold": "Gold reward", "model": "What the reward model says"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for (arm, runs), color in zip(result["runs"].items(), ("#c0392b", "#2f6fb0"), strict=True):
            for run in runs:
                axes.plot(curve([run], "distance"), curve([run], name), color=color, alpha=0.3)
            axes.plot(
                curve(runs, "distance"),
                curve(runs, name),
                color=color,
                lw=2.2,
                label=arm.strip("`"),
            )
        axes.set_title(title, fontsize=11, fontweight="bold", color=INK, loc="left")
        axes.set_xlabel("distance from the initial policy, √KL")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, colors=INK)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path)


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown, an arm a line."""
    lines = [
        "| | gold at the start | at its peak | at the end | the model's at its peak | at the end |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for arm, end in result["arms"].items():
        peak = f"{end['gold_peak']:.2f} (iteration {end['peak_iteration']})"
        lines.append(
            f"| {arm} | {end['gold_start']:.2f} | {peak} | {end['gold_end']:.2f} | "
            f"{end['model_peak']:.2f} | {end['model_end']:.2f} |"
        )
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--plot", help="write the figure to this file")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    result = measured(arguments.seeds)
    if arguments.plot:
        draw(result, arguments.plot)
    report_on(PAGE, "overoptimisation", result, table(result), arguments.save)


if __name__ == "__main__":
    main()
