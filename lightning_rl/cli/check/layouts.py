"""``check --layout``: on how many processes and threads this configuration trains fastest here."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning_rl.cli.check.scratch import Built
from lightning_rl.cli.check.stopwatch import TIMED
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines.vllm_local import VLLMLocal
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.module import PolicyModule
from lightning_rl.run import layout_cache
from lightning_rl.run.device_layout import DeviceLayout, fastest, layouts_of
from lightning_rl.run.dist import announced
from lightning_rl.run.layout_cache import Measured
from lightning_rl.run.machine import usable_cores

Row = dict[str, float]
"""Seconds that an iteration took, and its stages, by name."""

PARTS = ("generate", "train", "sync")
"""Stages with a column of their own."""

BUDGET_S = 75.0
"""All are measured once; once more as long as that ends within so many seconds."""

_PACKAGE_ROOT = str(Path(__file__).parents[3])


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


def compare(
    layouts: Sequence[DeviceLayout],
    arguments: Sequence[str],
    scratch: Path,
    key: dict[str, Any] | None = None,
) -> list[str]:
    """Measure layouts of what ``fit`` with these arguments does, and say which is fastest.

    ``key``: under which later runs find it, unless other work was measured too.

    Raises:
        LightningRLError: if none of them runs.
    """
    load, cores = os.getloadavg()[0], usable_cores()
    file = scratch / "iterations.json"
    rows = in_turns(layouts, lambda layout: _tried(layout, arguments, file))
    if not any(isinstance(found, list) for found in rows.values()):
        first = layouts[0].name
        raise LightningRLError(f"no layout could be measured; {first}: {rows[first]}")
    if not (busy := _busy(load, cores)):
        _keep(key, rows)
    return [*table(rows), *busy, verdict(layouts, rows)]


def _keep(key: dict[str, Any] | None, rows: Mapping[str, list[Row] | str]) -> None:
    """For ``fit``, which starts no vLLM to measure."""
    parts = ("iteration", "generate")
    seconds = {
        name: {part: _median(found, part) for part in parts}
        for name, found in rows.items()
        if isinstance(found, list)
    }
    if key is not None:
        layout_cache.write(key, Measured(seconds, thorough=True))


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


def _median(rows: Sequence[Row], part: str) -> float:
    """Of a stage; an iteration without the evaluation that it may have had."""
    if part == "iteration":
        return median(row["iteration"] - row["eval"] for row in rows)
    return median(row[part] for row in rows)
