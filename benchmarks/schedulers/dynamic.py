"""Simulate groups that are rejected, evicted or aborted, for `benchmarks.schedulers`.

Lengths are those of SmolLM2-135M-Instruct (`smollm2_lengths.json`): 8 completions of each of 48
prompts of `recipes/smollm2`, at temperature 1 and at most 1,024 tokens. A filter rejects 40% of the
groups, as many as have no spread in that recipe's runs.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.schedulers.simulated import GROUP_SIZE, GROUPS, PER_REQUEST, SLOTS, STEP, UNIT
from benchmarks.support.simulate import SimulatedEngine, Simulation, simulate
from lightning_rl.collect.collector import Collector, GroupFilter, SyncCollector
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.rollout import Group, Rollout

RECORDED = json.loads((Path(__file__).parent / "smollm2_lengths.json").read_text())
USEFUL = 0.6
TRAIN_SHARE = 0.3  # of the time that Sync spends on generation and training


def recorded(prompt: int, seed: int) -> int:
    """Return the tokens of one of SmolLM2's completions of a prompt."""
    lengths = RECORDED[prompt % len(RECORDED)]
    return int(lengths[seed % len(lengths)])


class Spread(GroupFilter):
    """Keeps a share of all groups, drawn from the group's seed."""

    def keep(self, group: Sequence[Rollout]) -> bool:
        return Random(group[0].seed).random() < USEFUL


class Rounds(SyncCollector):
    """Waits for all replacements before it asks for more, as DAPO's recipe does."""

    async def take(self, count: int) -> list[Group]:
        self.refill = None
        return await super().take(count)


@dataclass(frozen=True)
class Case:
    """A way of collecting; ``refill`` in units of the time that Sync takes for a batch."""

    make: Callable[[], Collector]
    filtered: bool = True
    refill: float | None = None


CASES = {
    "Sync, all groups": Case(SyncCollector, filtered=False),
    "Sync, filter, in rounds": Case(Rounds),
    "Sync, filter": Case(SyncCollector),
    "Sync, filter, refill 1.0": Case(SyncCollector, refill=1.0),
    "Sync, filter, refill 1.5": Case(SyncCollector, refill=1.5),
    "Async S=1, filter": Case(lambda: AsyncCollector(1)),
    "Async S=1, filter, abort": Case(lambda: AsyncCollector(1, abort_stale=True)),
    "Async S=2, filter": Case(lambda: AsyncCollector(2)),
    "Async S=2, filter, abort": Case(lambda: AsyncCollector(2, abort_stale=True)),
}


def dynamic(iterations: int) -> dict[str, dict[str, float]]:
    """Simulate all cases; shares are of all generated tokens."""

    def run(case: Case, per_token: float, refill: float | None) -> tuple[float, Simulation]:
        engine = SimulatedEngine(recorded, STEP / UNIT, PER_REQUEST / UNIT, SLOTS)
        result = simulate(
            case.make(),
            engine,
            iterations,
            GROUPS,
            GROUP_SIZE,
            train_seconds=lambda tokens: per_token * tokens,
            sync_seconds=1.0,
            filters=[Spread()] if case.filtered else [],
            refill_seconds=refill,
        )
        return engine.tokens, result

    _, alone = run(CASES["Sync, all groups"], 0.0, None)
    per_token = TRAIN_SHARE / (1 - TRAIN_SHARE) * alone.waited / alone.tokens
    batch_seconds = alone.waited / iterations
    return {
        name: _figures(*run(case, per_token, case.refill and case.refill * batch_seconds))
        for name, case in CASES.items()
    }


def _figures(generated: float, result: Simulation) -> dict[str, float]:
    groups = [group for batch in result.batches for group in batch]
    lengths = [rollout.length for group in groups for rollout in group]
    useful = sum(r.length for group in groups if Spread().keep(group) for r in group)
    ages = result.staleness
    return {
        "useful_per_s": useful / result.seconds,
        "wasted_by_filters": result.rejected / generated,
        "wasted_by_aborts": result.cancelled / generated,
        "made_up": result.made_up / generated,
        "trainer_idle": 1 - result.trained_seconds / result.seconds,
        "staleness_mean": sum(age * count for age, count in ages.items()) / ages.total(),
        "staleness_max": float(max(ages)),
        "tokens_mean": sum(lengths) / len(lengths),
    }


def dynamic_table(result: dict[str, dict[str, float]]) -> list[str]:
    """Return Markdown; speed is in useful tokens, relative to the first case."""
    first = next(iter(result.values()))["useful_per_s"]
    lines = [
        "| way | useful tokens/s | wasted by filters | wasted by aborts | trainer idle "
        "| staleness mean / max | tokens per rollout |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result.items():
        lines.append(
            f"| {name} | {row['useful_per_s'] / first:.2f} | {row['wasted_by_filters']:.0%} "
            f"| {row['wasted_by_aborts']:.1%} | {row['trainer_idle']:.0%} "
            f"| {row['staleness_mean']:.2f} / {row['staleness_max']:.0f} "
            f"| {row['tokens_mean']:.0f} |"
        )
    return lines
