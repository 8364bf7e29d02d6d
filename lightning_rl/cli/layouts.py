"""``check --layout``: on how many processes and threads this configuration trains fastest here."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lightning_rl.cli.scratch import Built
from lightning_rl.cli.stopwatch import TIMED
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines.vllm_local import VLLMLocal
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.module import PolicyModule
from lightning_rl.run.dist import announced
from lightning_rl.run.machine import usable_cores

Row = dict[str, float]
"""Seconds that an iteration took, and its stages, by name."""

PARTS = ("generate", "train", "sync")
"""Stages with a column of their own."""

BUDGET_S = 75.0
"""All are measured once; once more as long as that ends within so many seconds."""

CLOSE = 1.03
"""A layout must be faster than a simpler one by this factor: less is noise."""

_PACKAGE_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class DeviceLayout:
    """A way to use this machine: a name, and what the command line says for it.

    Args:
        name: for the table.
        flags: to add behind the others.
        environment: variables to set.
    """

    name: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    def command(self) -> str:
        """The command to type."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "lightning-rl fit ...", *map(shlex.quote, self.flags)])


def layouts_of(
    cores: int, groups: int, strategy: str = "auto", streams: bool = False, plain: bool = False
) -> list[DeviceLayout]:
    """Those that make sense for so many cores and groups per iteration, the simplest first.

    Of the numbers of processes that share the groups evenly the smallest and the largest;
    ``streams``: also engine and trainer at the same time, each on half of the cores; ``plain``:
    also without vLLM, in one process and in most.
    """
    alone = () if strategy == "auto" else ("--trainer.strategy", "auto")
    shared = [n for n in range(2, cores + 1) if groups % n == 0]
    streamed = [_streamed(cores, groups, alone)] if streams and cores > 1 else []
    one = [_processes(1, threads, alone) for threads in sorted({1, cores})]
    several = [_processes(n, cores // n) for n in sorted({*shared[:1], *shared[-1:]})]
    without = [_plain(layout) for layout in (*one, *several[-1:])] if plain else []
    return [*one, *streamed, *several, *without]


def _streamed(cores: int, groups: int, flags: tuple[str, ...]) -> DeviceLayout:
    """Half of the groups at a time, so that some are complete early."""
    flags = ("--trainer.devices", "1", *flags, "--data.collector", "StreamedCollector")
    in_flight = ("--data.collector.max_groups_in_flight", str(max(1, groups // 2)))
    # Two threads in all are one for each; more are divided.
    threads = 1 if cores == 2 else cores
    return DeviceLayout(
        "1 process, streamed", (*flags, *in_flight), {"OMP_NUM_THREADS": str(threads)}
    )


def _plain(layout: DeviceLayout) -> DeviceLayout:
    flags = (*layout.flags, "--data.engine", "TransformersEngine")
    return DeviceLayout(f"{layout.name}, TransformersEngine", flags, layout.environment)


def _processes(count: int, threads: int, flags: tuple[str, ...] = ()) -> DeviceLayout:
    processes = "1 process" if count == 1 else f"{count} processes"
    each = "1 thread" if threads == 1 else f"{threads} threads"
    return DeviceLayout(
        f"{processes}, {each}{'' if count == 1 else ' each'}",
        ("--trainer.devices", str(count), *flags),
        {"OMP_NUM_THREADS": str(threads)},
    )


def candidates(cli: Built) -> list[DeviceLayout]:
    """The layouts to compare for a configuration.

    Raises:
        ConfigError: if it is none that several processes on this machine's cores can share.
    """
    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    if not isinstance(module, PolicyModule) or not isinstance(data, RLDataModule):
        raise ConfigError(
            f"--layout measures iterations of a PolicyModule and an RLDataModule, not of a "
            f"{type(module).__name__}; leave it out"
        )
    device = trainer.strategy.root_device
    if device.type != "cpu" or trainer.num_nodes > 1:
        where = device if trainer.num_nodes == 1 else f"{trainer.num_nodes} machines"
        raise ConfigError(
            f"--layout measures how one machine's CPU cores are used best, and this run is on "
            f"{where}; leave it out, or add --trainer.accelerator cpu --trainer.num_nodes 1"
        )
    strategy = cli.config.fit.trainer.strategy
    if not isinstance(strategy, str) or not strategy.startswith(("auto", "ddp")):
        raise ConfigError(
            f"--layout compares processes that hold all weights each, and trainer.strategy is "
            f"{type(trainer.strategy).__name__}; add --trainer.strategy auto, or leave --layout out"
        )
    streams = type(data.collector) is SyncCollector and data.can_stream(module)
    stops = any(task.sampling.stop for task in data.train_tasks)
    plain = isinstance(data.engine, VLLMLocal) and not stops
    return layouts_of(usable_cores(), data.groups_per_iteration, strategy, streams, plain)


def compare(layouts: Sequence[DeviceLayout], arguments: Sequence[str], scratch: Path) -> list[str]:
    """Measure layouts of what ``fit`` with these arguments does, and say which is fastest.

    Raises:
        LightningRLError: if none of them runs.
    """
    load, cores = os.getloadavg()[0], usable_cores()
    file = scratch / "iterations.json"
    rows = in_turns(layouts, lambda layout: _tried(layout, arguments, file))
    if not any(isinstance(found, list) for found in rows.values()):
        first = layouts[0].name
        raise LightningRLError(f"no layout could be measured; {first}: {rows[first]}")
    return [*table(rows), *_busy(load, cores), verdict(layouts, rows)]


# ---------------------------------------------------------------- measuring


def in_turns(
    layouts: Sequence[DeviceLayout],
    measure: Callable[[DeviceLayout], list[Row] | str],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[Row] | str]:
    """The rows of each layout by name, or why there are none; in turns, since a machine changes."""
    found: dict[str, list[Row] | str] = {layout.name: [] for layout in layouts}
    begin = now = clock()
    took = 0.0
    while now + took - begin <= BUDGET_S:
        for layout in layouts:
            known = found[layout.name]
            if isinstance(known, list):
                new = measure(layout)
                found[layout.name] = new if isinstance(new, str) else known + new
        before, now = now, clock()
        took = now - before
        if all(isinstance(rows, str) for rows in found.values()):
            break
    return found


def _tried(layout: DeviceLayout, arguments: Sequence[str], file: Path) -> list[Row] | str:
    """The iterations of one try in a process of its own, or the last line that it printed."""
    path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "lightning_rl", "check", TIMED, str(file)]
    with announced(f"trying {layout.name}"):
        done = subprocess.run(
            [*command, *arguments, *layout.flags],
            env={**os.environ, "PYTHONPATH": path, **layout.environment},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return said[-1] if said else f"it ended with status {done.returncode}"
    rows: list[Row] = json.loads(file.read_text())
    return rows or "it ended with its first iteration, which does not count"


# ---------------------------------------------------------------- telling


def table(rows: Mapping[str, list[Row] | str]) -> list[str]:
    """A line for each layout: medians of the iterations that were measured."""
    width = max(map(len, rows))
    head = "".join(f"{name:>11}" for name in ("iteration", *PARTS, "measured"))
    lines = ["layouts, in seconds per iteration:", f"  {'':<{width}}{head}"]
    for name, found in rows.items():
        if isinstance(found, str):
            lines.append(f"  {name:<{width}}  did not run: {found}")
            continue
        figures = "".join(f"{_median(found, part):>11.3g}" for part in ("iteration", *PARTS))
        lines.append(f"  {name:<{width}}{figures}{len(found):>11}")
    return lines


def verdict(layouts: Sequence[DeviceLayout], rows: Mapping[str, list[Row] | str]) -> str:
    """Name the fastest, and how much faster than the others it is."""
    seconds = {
        layout: _median(found, "iteration")
        for layout in layouts
        if isinstance(found := rows[layout.name], list)
    }
    best = fastest(seconds)
    gains = ", ".join(
        f"{taken / seconds[best]:.2f} times as fast as {other.name}"
        for other, taken in seconds.items()
        if other != best
    )
    return f"fastest: {best.name}{f' ({gains})' if gains else ''}: `{best.command()}`"


def _busy(load: float, cores: int) -> list[str]:
    """A line if other work takes a good part of the machine."""
    if load <= cores / 2:
        return []
    return [
        f"  WARNING: {cores} cores had a load of {load:.1f} before; beside other work this says "
        "little: measure again when it is done"
    ]


def fastest(seconds: Mapping[DeviceLayout, float]) -> DeviceLayout:
    """The first, and so the simplest, of those that are as fast as the fastest."""
    least = min(seconds.values())
    return next(layout for layout, taken in seconds.items() if taken <= least * CLOSE)


def _median(rows: Sequence[Row], part: str) -> float:
    """Of a stage; an iteration without the evaluation that it may have had."""
    if part == "iteration":
        return median(row["iteration"] - row["eval"] for row in rows)
    return median(row[part] for row in rows)
