"""The part of `benchmarks.schedulers` that trains: sort_digits, vLLM, and a synthetic latency."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.floor import LR, OUT, prepare
from lightning_rl import (
    GRPO,
    AsyncCollector,
    Evaluate,
    JSONLPrompts,
    OneStepOffCollector,
    PolicyModule,
    RLCallback,
    RLDataModule,
    Sampling,
    SyncCollector,
    VLLMLocal,
    WeightSync,
)
from lightning_rl.collect.collector import Collector
from recipes.sort_digits.reward import exact_match

BOUND = 2
COLLECTORS: dict[str, Callable[[], Collector]] = {
    "sync": SyncCollector,
    "one_step_off": OneStepOffCollector,
    "async": lambda: AsyncCollector(BOUND),
}
WARMUP, ITERATIONS, ROUNDS = 2, 8, 2


async def slow_match(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """`exact_match`, by a judge who takes 0.2 to 0.4 s for most groups, and up to 4 for a few."""
    seconds = min(4.0, 0.2 * Random(prompts[0]).paretovariate(1.2))
    await asyncio.sleep(seconds)
    return exact_match(prompts, completions, **columns)


class Clock(RLCallback):
    """Notes when iterations end, and their metrics."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rows: list[dict[str, float]] = []

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        self.times.append(time.perf_counter())
        self.rows.append(metrics)


class KeptEngine(VLLMLocal):
    """One engine for all runs."""

    def close(self) -> None:
        self.version = -1


def fit(engine: VLLMLocal, collector: Collector, seed: int) -> Clock:
    """One short training run."""
    module = PolicyModule(
        str(OUT / "sft" / "hf"),
        advantage=GRPO(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, fused=True),
        seed=seed,
    )
    data = RLDataModule(
        JSONLPrompts(str(OUT / "train.jsonl"), seed=seed),
        [slow_match],  # type: ignore[list-item]
        engine,
        collector=collector,
        eval_prompts=JSONLPrompts(str(OUT / "heldout.jsonl")),
        sampling=Sampling(max_tokens=10),
        group_size=8,
        groups_per_iteration=32,
        iterations_per_epoch=WARMUP + ITERATIONS + 1,
        seed=seed,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            default_root_dir=directory,
            callbacks=[WeightSync(), Evaluate(1000, before_training=False), clock],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, datamodule=data)
    return clock


def measured() -> dict[str, Any]:
    """Wall time per iteration of each collector, taking turns, and the reward reached."""
    prepare()
    engine = KeptEngine(max_model_len=32)
    seconds: dict[str, list[float]] = {name: [] for name in COLLECTORS}
    accuracy: dict[str, list[float]] = {name: [] for name in COLLECTORS}
    staleness: dict[str, float] = {}
    for seed in range(ROUNDS):
        for name, make in COLLECTORS.items():
            clock = fit(engine, make(), seed)
            # The last iteration's time holds the evaluation.
            seconds[name].append((clock.times[-2] - clock.times[WARMUP]) / ITERATIONS)
            accuracy[name].append(clock.rows[-1]["eval/accuracy"])
            worst = max(row.get("rollout/staleness_max", 0.0) for row in clock.rows)
            staleness[name] = max(worst, staleness.get(name, 0.0))
            print(f"{name:>12}: {seconds[name][-1]:.2f} s per iteration", flush=True)
    VLLMLocal.close(engine)
    wall = {name: statistics.mean(values) for name, values in seconds.items()}
    return {
        "async_over_sync": wall["sync"] / wall["async"],
        "one_step_off_over_sync": wall["sync"] / wall["one_step_off"],
        "staleness_max": staleness["async"],
        "staleness_bound": BOUND,
        "seconds_per_iteration": wall,
        "accuracy_after": {name: statistics.mean(values) for name, values in accuracy.items()},
        "latency": "synthetic: a reward that sleeps, Pareto(1.2) from 0.2 to 4 s per group",
        "runs": ROUNDS,
        "iterations": ITERATIONS,
    }
