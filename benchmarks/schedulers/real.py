"""Train sort_digits for `benchmarks.schedulers`, with a latency and without one."""

import asyncio
import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks.support.task import OUT, KeptEngine, Rows, fit, make_data, make_module, prepare
from lightning_rl import (
    AsyncCollector,
    Evaluate,
    JSONLPrompts,
    OneStepOffCollector,
    SyncCollector,
    TransformersEngine,
    WeightSync,
)
from lightning_rl.collect.collector import Collector
from lightning_rl.engines.base import Engine
from recipes.sort_digits.reward import exact_match

BOUND = 2
Reward = Callable[..., Any]
COLLECTORS: dict[str, Callable[[], Collector]] = {
    "sync": SyncCollector,
    "one_step_off": OneStepOffCollector,
    "async": lambda: AsyncCollector(BOUND),
}
WARMUP, ITERATIONS, ROUNDS = 2, 8, 2


async def slow_match(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Match exactly, by a judge who takes 0.2 to 0.4 s for most groups, and up to 4 for a few."""
    seconds = min(4.0, 0.2 * Random(prompts[0]).paretovariate(1.2))
    await asyncio.sleep(seconds)
    return exact_match(prompts, completions, **columns)


class Clock(Rows):
    """Notes when iterations end, and their metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        self.times.append(time.perf_counter())
        self.rows.append(metrics)


def run(engine: Engine, reward: Reward, collector: Collector, seed: int) -> Clock:
    """Run one short training."""
    data = make_data(
        WARMUP + ITERATIONS + 1,
        engine,
        reward=reward,
        seed=seed,
        collector=collector,
        evaluation=JSONLPrompts(str(OUT / "heldout.jsonl")),
    )
    clock = Clock()
    callbacks = [WeightSync(), Evaluate(1000, before_training=False), clock]
    fit(make_module(seed=seed), data, callbacks, logs=False)
    return clock


def with_latency() -> dict[str, Any]:
    """Measure with vLLM and a reward that sleeps."""
    engine = KeptEngine(max_model_len=32)
    result = measured(engine, slow_match)
    engine.end()
    latency = "synthetic: a reward that sleeps, Pareto(1.2) from 0.2 to 4 s per group"
    return result | {"latency": latency}


def on_cores() -> dict[str, Any]:
    """Measure with transformers and no latency: the gain is that both halves compute at once."""
    return measured(TransformersEngine(), exact_match)


def measured(engine: Engine, reward: Reward) -> dict[str, Any]:
    """Return wall time per iteration of each collector, in turns, and the reward reached."""
    prepare()
    seconds: dict[str, list[float]] = {name: [] for name in COLLECTORS}
    accuracy: dict[str, list[float]] = {name: [] for name in COLLECTORS}
    staleness: dict[str, float] = {}
    for seed in range(ROUNDS):
        for name, make in COLLECTORS.items():
            clock = run(engine, reward, make(), seed)
            # The last iteration's time holds the evaluation.
            seconds[name].append((clock.times[-2] - clock.times[WARMUP]) / ITERATIONS)
            accuracy[name].append(clock.rows[-1]["eval/accuracy"])
            worst = max(row.get("rollout/staleness_max", 0.0) for row in clock.rows)
            staleness[name] = max(worst, staleness.get(name, 0.0))
            print(f"{name:>12}: {seconds[name][-1]:.2f} s per iteration", flush=True)
    wall = {name: statistics.mean(values) for name, values in seconds.items()}
    return {
        "async_over_sync": wall["sync"] / wall["async"],
        "one_step_off_over_sync": wall["sync"] / wall["one_step_off"],
        "staleness_max": staleness["async"],
        "staleness_bound": BOUND,
        "seconds_per_iteration": wall,
        "accuracy_after": {name: statistics.mean(values) for name, values in accuracy.items()},
        "runs": ROUNDS,
        "iterations": ITERATIONS,
    }
