"""What the simulation says of what others have published, and of what was measured here."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.scaling_simulated.constants import H20, H100, MODELS, OTHERS, Constants, Model
from benchmarks.scaling_simulated.costs import Lengths, Replica, Trainer
from benchmarks.scaling_simulated.runs import (
    ASYNC,
    SYNC,
    Layout,
    Load,
    Mode,
    Row,
    measured_spread,
    run,
)
from benchmarks.scaling_simulated.sync import Push, broadcast, shared_broadcast
from benchmarks.support.results import RESULTS
from lightning_rl.collect.ahead import AsyncCollector

REPRODUCED = 1.25
"""Times, or less than its inverse: further off, a figure is not reproduced."""


@dataclass(frozen=True)
class Check:
    """One figure; ``ratio`` is the simulation's over the published or measured one."""

    what: str
    source: str
    theirs: float
    ours: float
    unit: str = "s"
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def reproduced(self) -> bool:
        return 1 / REPRODUCED <= self.ratio <= REPRODUCED

    def record(self) -> dict[str, Any]:
        """For the result."""
        return vars(self) | {"ratio": self.ratio, "reproduced": self.reproduced}


# ---------------------------------------------------------------- published: syncs

OUT_OF_REACH = "15.2 GB in 0.02 s is 760 GB/s, where the link has 450: not all of it was timed"
FIXED = "0.1 s of it is a push's fixed cost, as measured on a CPU"
ALL_TO_ALL = "here each worker is sent all weights"
NO_DELTA = "no transport here sends single changed weights; all modules change, so all is sent"
STAND_IN = replace(MODELS["30B-A3B"], name="67B", layers=106)
FULLY, DELTA = "verl, fully_async.md", "verl, delta_weight_sync.md"


def syncs() -> Iterator[Check]:
    """Transports by their formulas, where others have timed theirs: one group for all engines where
    theirs are in one. An engine's GPUs are assumed where they are not told.
    """
    verl_7b = Push(H20, OTHERS["7B"], 4, 1, 4, H20.nvlink)
    verl_30b, verl_235b = (Push(H20, MODELS[m], n, n // 8, 8) for m, n in (
        ("30B-A3B", 16), ("235B-A22B", 64),
    ))  # fmt: skip
    small = Push(H100, OTHERS["2.5-32B"], 16, 2, 8)
    middle = Push(H100, OTHERS["72B"], 32, 4, 8)
    large = Push(H100, MODELS["235B-A22B"], 64, 1, 16)
    marin = Push(H100, STAND_IN, 32, 1, 8)
    single = Push(H100, MODELS["0.6B"], 1, 1, 1, H100.nvlink)
    slower = "theirs moves 4.6 GB/s, from the same shards over the same links"
    one_group = "all engines in one group, as theirs"
    rows: list[tuple[str, str, float, float, str]] = [
        ("7B, 4 + 4 H20", FULLY, 0.02, broadcast(verl_7b), OUT_OF_REACH),
        ("30B-A3B, 16 + 16 H20", FULLY, 4.38, shared_broadcast(verl_30b), one_group),
        ("235B-A22B, 64 + 64 H20", FULLY, 23.70, shared_broadcast(verl_235b), one_group),
        ("0.6B, 1 + 1 H100", "trl#5892", 0.18, broadcast(single), FIXED),
        ("2.5-32B, 16 + 16 H100", DELTA, 14.2, broadcast(small), slower),
        ("72B, 32 + 32 H100", DELTA, 28.8, broadcast(middle), ""),
        (
            "235B-A22B, 64 + 16 H100",
            DELTA,
            256.0,
            broadcast(large),
            "theirs gathers the experts in another way",
        ),
        ("the same, delta", DELTA, 13.2, broadcast(large), NO_DELTA),
        (
            "67B, 32 + 8 H100",
            "marin#9171",
            20.2,
            broadcast(marin),
            "shape assumed: a deeper 30B-A3B",
        ),
        ("the same, each engine its experts", "marin#9171", 1.6, broadcast(marin), ALL_TO_ALL),
    ]
    for what, source, theirs, ours, note in rows:
        yield Check(f"sync of {what}", source, theirs, ours, note=note)


# ---------------------------------------------------------------- published: iterations


def pair(
    c: Constants, model: Model, load: Load, gpus: int, engine: int, in_flight: float
) -> tuple[Row, Row]:
    """Colocated on all GPUs, and asynchronous on halves, with engines of ``engine`` GPUs.

    ``in_flight``: batches. As theirs, rollouts may be eight versions old, and ranks get rollouts of
    equally many tokens.
    """
    replica = Replica(c, model, engine, load.lengths)
    groups = round(in_flight * load.groups)
    later = replace(ASYNC, make=lambda: AsyncCollector(8, groups), ahead=math.ceil(in_flight) - 1)

    def one(mode: Mode, training: int, generating: int) -> Row:
        trainer = Trainer(c, model, training, load.lengths)
        layout = Layout(trainer, replica, generating // engine)
        row = run(c, model, load, gpus, mode, layout, balance=1.0)
        assert row is not None
        return row

    return one(SYNC, gpus, gpus), one(later, gpus // 2, gpus // 2)


def with_update(c: Constants, model: Model, load: Load, gpus: int, seconds: float) -> Load:
    """Rollouts so long that an update takes ``seconds``, where a mean was not published."""
    low, high = 64.0, load.limit / 2
    for _ in range(20):
        tried = replace(load, mean=(low + high) / 2)
        update = Trainer(c, model, gpus, tried.lengths).train(tried.tokens, load.groups)
        low, high = (tried.mean, high) if update < seconds else (low, tried.mean)
    return replace(load, mean=low)


def iterations() -> Iterator[Check]:
    """verl's comparisons of asynchronous with synchronous runs."""
    note = "Qwen3-30B-A3B instead; a layer in four of theirs has a cache that grows"
    load = Load(32_768, H100.mean_32k, *measured_spread(), 64, 8)
    sync, later = pair(H100, MODELS["30B-A3B"], load, 32, engine=4, in_flight=2)
    source = "verl, v1_async_trainer.md"
    what = "Qwen3.5-35B-A3B, 32 GPUs, 32k"
    yield Check(f"{what}: synchronous step", source, 22.79 * 3600 / 150, sync.iteration, note=note)
    yield Check(f"{what}: asynchronous step", source, 14.1 * 3600 / 150, later.iteration, note=note)
    gain = later.tokens_per_s_gpu / sync.tokens_per_s_gpu
    yield Check(f"{what}: gain in tokens/s", source, 1.562, gain, "x", note)

    short = Load(28_672, 0.0, *measured_spread(), 128, 16)
    load = with_update(H20, OTHERS["7B"], short, 32, 113.81)
    sync, later = pair(H20, OTHERS["7B"], load, 32, engine=1, in_flight=1.5)
    note = (
        f"a quarter of its 128 GPUs and 512 x 16 rollouts; mean of {load.mean:,.0f} tokens set by "
        "its update of 114 s"
    )
    what = "Qwen2.5-7B, H20, 28k"
    yield Check(f"{what}: synchronous step", FULLY, 356.3, sync.iteration, note=note)
    note = (
        "their update takes no longer on half of the GPUs, here twice; theirs does not score again"
    )
    yield Check(f"{what}: asynchronous step", FULLY, 150.63, later.iteration, note=note)
    gain = later.tokens_per_s_gpu / sync.tokens_per_s_gpu
    yield Check(f"{what}: gain, 2.35-2.67", FULLY, 2.5, gain, "x", note)


# ---------------------------------------------------------------- measured here


def result_of(name: str) -> Any:
    """What a benchmark has saved."""
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


def through(x: tuple[float, float], y: tuple[float, float]) -> Callable[[float], float]:
    """The straight line through two points."""
    slope = (y[1] - y[0]) / (x[1] - x[0])
    return lambda at: y[0] + slope * (at - x[0])


def measured() -> Iterator[Check]:
    """Formulas against saved results: their form on CPUs, and an update on a GPU."""
    sizes = result_of("sync-cpu")["sizes"]
    outer = sizes["1M"], sizes["500M"]
    count = outer[0]["parameters"], outer[1]["parameters"]
    for name in ("memory", "collective", "checkpoint"):
        line = through(count, (outer[0][name]["seconds"], outer[1][name]["seconds"]))
        middle = sizes["100M"]
        yield Check(
            f"sync of 104 M, {name}: on a line between 0.8 M and 492 M",
            "sync-cpu.json",
            middle[name]["seconds"],
            line(middle["parameters"]),
            note="a shared disk: runs differ by five times" if name == "checkpoint" else "",
        )
    large = result_of("scaling-cpu")["large"]
    even = Load(24, 24.0, 1e-9, 0.0, 32, 8)
    for part in ("generate", "train"):
        expected = large["1"][part] / 2 * even.imbalance(2)
        what = f"{part} on two processes, 27 M: half of one's"
        yield Check(what, "scaling-cpu.json", large["2"][part], expected)
    records = (RESULTS / "gpu-check-h200.jsonl").read_text().splitlines()
    figures = next(
        record["figures"] for record in map(json.loads, records) if record["check"] == "update-0.5B"
    )
    for name, (rollouts, length) in {"60x256": (60, 256), "1x16000": (1, 16_000)}.items():
        trainer = Trainer(H100, OTHERS["0.5B"], 1, Lengths.of([length]))
        yield Check(
            f"update of 0.5B on one GPU, {name}",
            "gpu-check-h200.jsonl",
            figures[name]["update ms"] / 1000,
            trainer.train(rollouts * length, rollouts),
            note="other jobs were on the card; such a small model's head does not reach mfu",
        )


def all_checks() -> list[Check]:
    """Published first."""
    return [*syncs(), *iterations(), *measured()]


def typical_factor(checks: list[Check]) -> float:
    """By how much the simulation is off, up or down: the geometric mean."""
    logs = [abs(math.log(check.ratio)) for check in checks]
    return math.exp(sum(logs) / len(logs))
