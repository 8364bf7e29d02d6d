"""Simulate collectors on loads, on a virtual clock, for `benchmarks.schedulers`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from benchmarks.support.simulate import SimulatedEngine, Simulation, simulate
from lightning_rl.collect.collector import Collector, SyncCollector
from lightning_rl.collect.partial import PartialCollector, TailBatchingCollector
from lightning_rl.collect.prefetch import AsyncCollector, OneStepOffCollector
from lightning_rl.collect.streamed import StreamedCollector

GROUPS, GROUP_SIZE = 32, 8
SLOTS = GROUPS * GROUP_SIZE
UNIT = 16  # tokens that one simulated token stands for
STEP, PER_REQUEST = 0.010 * UNIT, 0.00006 * UNIT
LONGEST = 16_384 // UNIT
SAME_PROMPT = 0.5  # share of the variance (of the logarithm) that the prompt explains

COLOCATED = "Sync, colocated"
STREAMED = "Streamed"
SCHEDULERS: dict[str, Callable[[], Collector]] = {
    "Sync": SyncCollector,
    COLOCATED: SyncCollector,
    STREAMED: StreamedCollector,
    "OneStepOff": OneStepOffCollector,
    "Async S=1": lambda: AsyncCollector(1),
    "Async S=2": lambda: AsyncCollector(2),
    "Async S=4": lambda: AsyncCollector(4),
    "Partial 1.25": lambda: PartialCollector(1.25),
    "Partial 1.5": lambda: PartialCollector(1.5),
    "Partial 2": lambda: PartialCollector(2.0),
    "TailBatching 1.25": lambda: TailBatchingCollector(1.25),
    "TailBatching 1.5": lambda: TailBatchingCollector(1.5),
}
TRAIN_SHARES = (0.1, 0.3, 0.5)  # of the time that Sync spends on generation and training
HEADLINE = ("lognormal", 0.3)
BOUND = 2  # of the asynchronous scheduler in the last line


@cache
def normal(*key: int) -> float:
    """Draw a standard normal number that depends on nothing but the key."""
    return Random(repr(key)).gauss()


def normal_by(prompt: int, seed: int) -> float:
    """Draw a standard normal number, correlated between the rollouts of a prompt."""
    own = math.sqrt(1 - SAME_PROMPT) * normal(prompt, seed)
    return math.sqrt(SAME_PROMPT) * normal(prompt) + own


def fixed(prompt: int, seed: int) -> int:
    """Return 2,400 tokens."""
    return 2400 // UNIT


def lognormal(prompt: int, seed: int) -> int:
    """Draw a length of median 1,500, log standard deviation 1: 1% are ten times as long."""
    return min(LONGEST, round(1500 / UNIT * math.exp(normal_by(prompt, seed))))


def pareto(prompt: int, seed: int) -> int:
    """Draw at least 800 tokens with tail exponent 1.5."""
    above = 0.5 * math.erfc(normal_by(prompt, seed) / math.sqrt(2))
    return min(LONGEST, round(800 / UNIT * above ** (-1 / 1.5)))


LENGTHS = {"fixed": fixed, "lognormal": lognormal, "pareto": pareto}


@dataclass(frozen=True)
class Row:
    """One scheduler on one load; see `docs/collectors.md` for what the columns mean."""

    lengths: str
    train_share: float
    scheduler: str
    tokens_per_s: float
    engine_bubble: float
    trainer_idle: float
    wasted: float
    staleness_mean: float
    staleness_max: int
    staleness: dict[int, float]


def measure(lengths: str, train_share: float, scheduler: str, iterations: int) -> Row:
    """Simulate a run of so many iterations."""
    devices = 2 if scheduler == COLOCATED else 1
    slots = SLOTS * devices
    engine = SimulatedEngine(LENGTHS[lengths], STEP, PER_REQUEST / devices, slots)
    per_token = train_share / (1 - train_share) * generation_seconds(lengths, iterations) / devices
    result = simulate(
        SCHEDULERS[scheduler](),
        engine,
        iterations,
        GROUPS,
        GROUP_SIZE,
        train_seconds=lambda tokens: per_token * tokens,
        sync_seconds=1.0,
    )
    return summary(lengths, train_share, scheduler, result, engine, slots)


@cache
def generation_seconds(lengths: str, iterations: int) -> float:
    """Return the seconds per token of a Sync that does nothing but generate."""
    engine = SimulatedEngine(LENGTHS[lengths], STEP, PER_REQUEST, SLOTS)
    result = simulate(SyncCollector(), engine, iterations, GROUPS, GROUP_SIZE)
    return result.seconds / result.tokens


def summary(
    lengths: str,
    train_share: float,
    scheduler: str,
    result: Simulation,
    engine: SimulatedEngine,
    slots: int,
) -> Row:
    """Return the figures of a simulation."""
    trained = result.tokens / engine.tokens
    ages = {age: count / result.tokens for age, count in sorted(result.staleness.items())}
    return Row(
        lengths,
        train_share,
        scheduler,
        result.tokens * UNIT / result.seconds,
        1 - result.slot_seconds * trained / (slots * result.seconds),
        1 - result.trained_seconds / result.seconds,
        max(0.0, 1 - trained),
        sum(age * share for age, share in ages.items()),
        max(ages),
        ages,
    )


def find(rows: list[Row], lengths: str, train_share: float, scheduler: str) -> Row:
    key = (lengths, train_share, scheduler)
    return next(row for row in rows if (row.lengths, row.train_share, row.scheduler) == key)


def speed(row: Row, rows: list[Row]) -> float:
    """Return trained tokens per second, relative to Sync's on the same load."""
    return row.tokens_per_s / find(rows, row.lengths, row.train_share, "Sync").tokens_per_s
