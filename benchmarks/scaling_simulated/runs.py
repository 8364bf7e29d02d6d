"""Simulated runs: the library's collectors on a virtual clock, with a large cluster's costs."""

import asyncio
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from torch import Tensor

from benchmarks.scaling_simulated.constants import Constants, Model
from benchmarks.scaling_simulated.costs import Lengths, Replica, Trainer
from benchmarks.scaling_simulated.sync import Push, broadcast, in_process, shared_broadcast
from benchmarks.schedulers.simulated import normal
from benchmarks.support.results import RESULTS
from benchmarks.support.simulate import SimulatedEngine, simulate
from lightning_rl.collect.ahead import AsyncCollector, OneStepOffCollector
from lightning_rl.collect.collector import Collector, SyncCollector

UNITS = 64  # that the longest rollout is simulated in
WARMUP, COUNTED = 3, 3  # iterations
PARTS = ("generate", "logprob", "train", "sync", "waiting")


@dataclass(frozen=True)
class Load:
    """An iteration's rollouts: lognormal, cut at ``limit`` tokens, such that ``mean`` is the mean.

    ``deviation`` is the logarithm's, ``same_prompt`` the share of its variance between prompts.
    """

    limit: int
    mean: float
    deviation: float
    same_prompt: float
    groups: int
    group_size: int

    @property
    def unit(self) -> float:
        """Tokens that one simulated token stands for."""
        return self.limit / UNITS

    def __call__(self, prompt: int, seed: int) -> int:
        """Simulated tokens of a rollout."""
        own = math.sqrt(1 - self.same_prompt) * normal(prompt, seed)
        drawn = math.sqrt(self.same_prompt) * normal(prompt) + own
        tokens = self.median * math.exp(self.deviation * drawn)
        return max(1, min(UNITS, round(tokens / self.unit)))

    @cached_property
    def median(self) -> float:
        """Before the cut; found by halving, for the mean after the cut grows with it."""
        low, high = 1.0, 100.0 * self.limit
        for _ in range(60):
            middle = math.sqrt(low * high)
            if cut_mean(middle, self.deviation, self.limit) < self.mean:
                low = middle
            else:
                high = middle
        return low

    @cached_property
    def sample(self) -> list[list[float]]:
        """Tokens of 256 groups."""
        groups, size = range(256), range(self.group_size)
        return [[self.unit * self(prompt, seed) for seed in size] for prompt in groups]

    @cached_property
    def lengths(self) -> Lengths:
        return Lengths.of([length for group in self.sample for length in group])

    @property
    def tokens(self) -> float:
        """Of an iteration, on average."""
        return self.groups * self.group_size * self.lengths.mean

    def imbalance(self, ranks: int) -> float:
        """What the fullest of ``ranks`` has over the mean, when groups are dealt out in turns."""
        sums = [sum(group) for group in self.sample]
        ratios = []
        for begin in range(0, len(sums) - self.groups + 1, self.groups):
            batch = sums[begin : begin + self.groups]
            dealt = [sum(batch[rank::ranks]) for rank in range(ranks)]
            ratios.append(max(dealt) * ranks / sum(batch))
        return sum(ratios) / len(ratios)


def cut_mean(median: float, deviation: float, limit: float) -> float:
    """Mean of min(x, limit) for a lognormal x: its partial mean, and the limit for the rest."""
    below = (math.log(limit) - math.log(median)) / deviation
    partial = median * math.exp(deviation**2 / 2) * cumulative(below - deviation)
    return partial + limit * (1 - cumulative(below))


def cumulative(z: float) -> float:
    """Of the standard normal distribution."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


@cache
def measured_spread() -> tuple[float, float]:
    """The deviation, and prompts' share of the variance, that `scaling_lengths` has measured."""
    found = json.loads((RESULTS / "scaling-lengths-cpu.json").read_text())["result"]
    return found["log_deviation"], found["same_prompt"]


def load_of(c: Constants, limit: int) -> Load:
    """As heavy-tailed as measured, and as long for its limit as verl's at 32,768."""
    mean = c.mean_32k * limit / 32_768
    return Load(limit, mean, *measured_spread(), c.groups, c.group_size)


class Fleet(SimulatedEngine):
    """Replicas that share all requests evenly; each simulated token stands for ``unit`` tokens."""

    def __init__(self, load: Load, replica: Replica, replicas: int) -> None:
        super().__init__(load, max_num_seqs=replicas * replica.slots)
        self.replica, self.replicas, self.unit = replica, replicas, load.unit
        self.pushed: list[float] = []  # when
        self._seconds: dict[int, float] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        self.pushed.append(asyncio.get_running_loop().time())

    def token_seconds(self, running: int) -> float:
        if running not in self._seconds:
            each = max(1.0, running / self.replicas)
            self._seconds[running] = self.unit * self.replica.step(each)
        return self._seconds[running]


@dataclass(frozen=True)
class Mode:
    """A way to schedule; ``ahead``: batches that may be in flight besides the one awaited."""

    name: str
    make: Callable[[], Collector]
    colocated: bool = False
    ahead: int = 0
    rereads: bool = False
    push: Callable[[Push], float] = broadcast


SYNC = Mode("sync, colocated", SyncCollector, colocated=True, push=in_process)
ONE_STEP = Mode("one step off", OneStepOffCollector, ahead=1)
ASYNC = Mode("async, staleness 2", lambda: AsyncCollector(2), ahead=2, rereads=True)
MODES = (SYNC, ONE_STEP, ASYNC)
ASYNC_SHARED = replace(ASYNC, name="async, shared collective", push=shared_broadcast)


@dataclass(frozen=True)
class Layout:
    """How many GPUs train and how many generate; all do both where these are the same."""

    trainer: Trainer
    replica: Replica
    replicas: int

    @property
    def engine_gpus(self) -> int:
        return self.replicas * self.replica.gpus


def layouts(c: Constants, model: Model, load: Load, gpus: int, mode: Mode) -> list[Layout]:
    """Those that fit into memory: 1/2, 1/4 or 1/8 of the GPUs train, or all."""
    replica = Replica.smallest(c, model, load.lengths)
    shares = (1,) if mode.colocated else (2, 4, 8)
    found = []
    for share in shares:
        trainer = Trainer(c, model, gpus // share, load.lengths)
        left = gpus if mode.colocated else gpus - trainer.gpus
        if trainer.gpus >= max(1, trainer.needed) and left >= replica.gpus:
            found.append(Layout(trainer, replica, left // replica.gpus))
    return found


@dataclass(frozen=True)
class Row:
    """One run: seconds of an iteration, and how many of them each GPU spends on what, on average.

    ``generate`` is what the tokens would take with all of an engine's places taken; ``waiting`` is
    what is left: GPUs that idle, and decode fewer rollouts at a time than fit.
    """

    model: str
    limit: int
    gpus: int
    mode: str
    trainer_gpus: int
    engine_gpus: int
    iteration: float
    generate: float
    logprob: float
    train: float
    sync: float
    waiting: float
    trainer_waits: float
    tokens_per_s_gpu: float

    @property
    def waiting_share(self) -> float:
        return self.waiting / self.iteration


def run(
    c: Constants,
    model: Model,
    load: Load,
    gpus: int,
    mode: Mode,
    layout: Layout | None = None,
    balance: float | None = None,
) -> Row | None:
    """Simulate; None if the model does not fit. Of several layouts, that whose longer half is the
    shortest. ``balance``: the fullest rank's share over the mean, if not as groups are dealt out.
    """
    possible = [layout] if layout else layouts(c, model, load, gpus, mode)
    if not possible:
        return None
    chosen = min(possible, key=lambda each: _longer_half(each, load))
    trainer, replica, replicas = chosen.trainer, chosen.replica, chosen.replicas
    balance = balance or load.imbalance(min(trainer.gpus, load.groups))
    logprob = trainer.score(load.tokens, load.groups, balance)
    train = trainer.train(load.tokens, load.groups, balance)
    outlet = c.nvlink if gpus <= c.node else c.network
    sync = mode.push(Push(c, model, trainer.gpus, replicas, replica.gpus, outlet))
    if mode.rereads:
        waiting = mode.ahead * load.groups * load.group_size / replicas
        sync += replica.reread(min(replica.slots, waiting))
    engine = Fleet(load, replica, replicas)
    per_unit = (logprob + train) / (load.tokens / load.unit)
    result = simulate(
        mode.make(),
        engine,
        WARMUP + COUNTED,
        load.groups,
        load.group_size,
        train_seconds=lambda units: per_unit * units,
        sync_seconds=sync,
        ahead=True,  # the last iterations are like those before
    )
    iteration = (engine.pushed[-1] - engine.pushed[WARMUP - 1]) / COUNTED
    units = sum(
        len(rollout.token_ids)
        for batch in result.batches[WARMUP:]
        for group in batch
        for rollout in group
    )
    tokens = load.unit * units / COUNTED
    part = tokens / load.tokens  # these batches are not quite the average
    best = tokens * replica.best * replica.gpus / gpus
    trains = trainer.gpus / gpus
    parts = (best, part * logprob * trains, part * train * trains, sync)
    return Row(
        model.name,
        load.limit,
        gpus,
        mode.name,
        trainer.gpus,
        chosen.engine_gpus,
        iteration,
        *parts,
        iteration - sum(parts),
        iteration - part * (logprob + train) - sync,
        tokens / iteration / gpus,
    )


def _longer_half(layout: Layout, load: Load) -> float:
    """Seconds of an iteration by whichever of trainer and engines takes longer."""
    generating = load.tokens * layout.replica.best / layout.replicas
    trainer = layout.trainer
    training = trainer.score(load.tokens, load.groups) + trainer.train(load.tokens, load.groups)
    return max(generating, training)
