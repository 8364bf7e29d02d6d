"""Which layout ``fit`` takes on a CPU where the user chose none: measured, now or before."""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.agents.base import SingleTurn
from lightning_rl.callbacks.checkpoint import IterationCheckpoint
from lightning_rl.cli.probe import Trial, measure
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.config.hints import import_object
from lightning_rl.config.layers import Table
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import TransformersEngine, default_engine
from lightning_rl.module import PolicyModule
from lightning_rl.run import layout_cache
from lightning_rl.run.checkpoint_io import about, checkpoints_in
from lightning_rl.run.device_layout import CLOSE, DeviceLayout, fastest, layouts_of
from lightning_rl.run.layout_cache import Measured
from lightning_rl.run.machine import usable_cores
from lightning_rl.run.newest import newest_run
from lightning_rl.run.rundir import OWN_RUNS

SWITCH = "LIGHTNING_RL_LAYOUT"
"""The variable that says what ``--layout`` is where it is not given."""
BUDGET_S = 10.0
BUSY = 0.75
"""Load of a core from which on other work would be measured too."""
WORTH = 20
"""Iterations of a run for which it pays to measure."""
VLLM_START_S = 7.0
"""What vLLM takes to start: it cannot win where less is spent on generating in all."""

_STARTED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "SLURM_JOB_ID")
"""Set where a launcher has decided on the processes."""
_SEARCHES = "lightning-rl check --layout (about a minute) measures all, for later runs too"


def layout_options(own: Namespace, table: Callable[[], Table]) -> list[str]:
    """What to add to the options of ``fit`` for the fastest layout; [] to leave all as it is.

    Args:
        own: the configuration.
        table: tells the same, flat.
    """
    if own.layout == "plain" or set(_STARTED) & set(os.environ):
        return []
    if own.ckpt_path is not None:
        return options_as_then(own, _configuration_then(own))
    if not _is_free(own):
        return []
    layouts = free_layouts(own, os.environ.get("OMP_NUM_THREADS"))
    key = layout_cache.key_of(table(), _engine_of(own).__name__) if len(layouts) > 1 else None
    if key is None:
        return []
    known, earlier = layout_cache.read(key), True
    iterations = planned_iterations(own)
    if known is None and iterations >= WORTH and (trials := _trials(own, layouts)):
        load = os.getloadavg()[0]
        if load > BUSY * usable_cores():
            rank_zero_info(f"layout: as configured; with a load of {load:.1f} nothing is measured")
            return []
        known, earlier = Measured(measure(trials, BUDGET_S)), False
        if len(known.seconds) > 1:
            layout_cache.write(key, known)
    if known is None:
        return []
    chosen, why = choose(layouts, known, iterations)
    when = "measured before on this machine" if earlier else "measured just now"
    rank_zero_info(f"layout: {why} ({when}; --layout plain measures and changes nothing)")
    return [] if chosen is None else options_of(chosen)


def choose(
    layouts: Sequence[DeviceLayout], known: Measured, iterations: float
) -> tuple[DeviceLayout | None, str]:
    """The layout to take, None for what the configuration says, and why."""
    seconds = {
        layout: known.seconds[layout.name]["iteration"]
        for layout in layouts
        if layout.name in known.seconds
    }
    if len(seconds) < 2:
        return None, "as configured, for no two could be compared"
    best = fastest(seconds)
    unknown = [layout for layout in layouts if layout not in seconds]
    if not known.thorough and any("--data.engine" not in layout.flags for layout in unknown):
        generating = iterations * known.seconds[best.name]["generate"]
        if "--data.engine" in best.flags and generating > VLLM_START_S:
            return None, f"as configured, with vLLM, which may be faster; {_SEARCHES}"
    slowest = max(seconds, key=lambda layout: seconds[layout])
    gain = seconds[slowest] / seconds[best]
    beside = "no slower than others" if gain < CLOSE else f"{gain:.2f} times {slowest.name}"
    return best, f"{best.name}: {seconds[best]:.3g} s per iteration, {beside}"


def options_of(layout: DeviceLayout) -> list[str]:
    """What a command line says for it, threads included, which no other option holds."""
    return [*layout.flags, "--threads", layout.environment["OMP_NUM_THREADS"]]


def free_layouts(own: Namespace, threads: str | None) -> list[DeviceLayout]:
    """Those that differ in nothing that was chosen; ``threads``: by ``OMP_NUM_THREADS``."""
    given, data = own.threads or threads, own.data.init_args
    without = data.engine is None and find_spec("vllm") is not None
    layouts = layouts_of(usable_cores(), data.groups_per_iteration, plain=without)
    devices = str(own.trainer.devices)
    return [
        layout
        for layout in layouts
        if devices in ("auto", layout.flags[1])
        and (given is None or layout.environment["OMP_NUM_THREADS"] == str(given))
    ]


def planned_iterations(own: Namespace) -> float:
    """How many the configuration trains at most."""
    trainer, each = own.trainer, own.data.init_args.iterations_per_epoch
    epochs = trainer.max_epochs
    if epochs is None:
        return inf
    count = inf if epochs < 0 else epochs * each
    limit = trainer.limit_train_batches
    return count if not isinstance(limit, int) else min(count, limit * max(1, epochs))


def _is_free(own: Namespace) -> bool:
    """Whether it is a run of which layouts can be compared, and something was left open."""
    trainer = own.trainer
    alone = (
        trainer.strategy == "auto"
        and trainer.num_nodes == 1
        and trainer.accelerator in ("auto", "cpu")
        and not trainer.plugins
        and not trainer.fast_dev_run
        and (trainer.accelerator == "cpu" or not torch.cuda.is_available())
    )
    if not alone or import_object(own.model.class_path) is not PolicyModule:
        return False
    if import_object(own.data.class_path) is not RLDataModule:
        return False
    data = own.data.init_args
    one_turn = _class(data.agent) in (None, SingleTurn)
    waits = _class(data.collector) in (None, SyncCollector)
    needs_vllm = _held(data.sampling, "stop") or _held(data.sampling, "structured_outputs")
    return one_turn and waits and not (data.buffer or data.expert_prompts or needs_vllm)


def _held(part: Any, name: str) -> Any:
    """An argument of a part that was configured, or of an object that is a default."""
    return getattr(part.get("init_args", part) if isinstance(part, Namespace) else part, name, None)


def _class(part: Any) -> type | None:
    found = getattr(part, "class_path", None)
    return None if found is None else import_object(found)


def _engine_of(own: Namespace) -> type:
    return _class(own.data.init_args.engine) or type(default_engine())


def _trials(own: Namespace, layouts: Sequence[DeviceLayout]) -> dict[str, Trial]:
    """Those that start at once: with vLLM a try would take all of the time to start it."""
    plain = _engine_of(own) is TransformersEngine
    tried = [layout for layout in layouts if plain or "--data.engine" in layout.flags]
    parts = {name: own[name].as_dict() for name in ("model", "data")}
    sizes = {layout.name: _size(layout) for layout in tried}
    most = max((processes for processes, _ in sizes.values()), default=1)
    precision = str(own.trainer.precision or "32-true")
    return {
        name: Trial(**parts, precision=precision, processes=p, threads=t, most_processes=most)
        for name, (p, t) in sizes.items()
    }


def _size(layout: DeviceLayout) -> tuple[int, int]:
    return int(layout.flags[1]), int(layout.environment["OMP_NUM_THREADS"])


# ---------------------------------------------------------------- a run that goes on


def options_as_then(own: Namespace, then: Mapping[str, Any]) -> list[str]:
    """What a run was laid out as, of what is not chosen now."""
    options: list[str] = []
    if own.trainer.devices == "auto" and then.get("trainer.devices") not in (None, "auto"):
        options += ["--trainer.devices", str(then["trainer.devices"])]
    threads = own.threads or os.environ.get("OMP_NUM_THREADS")
    if threads is None and then.get("threads") is not None:
        options += ["--threads", str(then["threads"])]
    data = own.data.get("init_args") or Namespace()
    if "engine" in data and data.engine is None and then.get("data.engine") is not None:
        options += ["--data.engine", str(then["data.engine"])]
    return options


def _configuration_then(own: Namespace) -> Table:
    """The table that the checkpoint tells; {} if there is none yet."""
    path = Path(str(own.ckpt_path))
    if own.ckpt_path == "last":
        checkpoints = checkpoints_in(_checkpoints_of(own))
        if not checkpoints:
            return {}
        path = checkpoints[0]
    table: Table = (about(path).get("run") or {}).get("configuration") or {}
    return table


def _checkpoints_of(own: Namespace) -> Path:
    """Where ``last`` will be looked for."""
    trainer = own.trainer
    for callback in trainer.callbacks or []:
        if issubclass(import_object(callback.class_path), IterationCheckpoint):
            given = callback.init_args.get("dirpath")
            if given is not None:
                return Path(given)
    root = Path(trainer.default_root_dir or ".")
    runs = root / OWN_RUNS
    logger = trainer.logger[0] if isinstance(trainer.logger, list) else trainer.logger
    if logger in (None, True):
        runs = root / "lightning_logs"
    elif logger and issubclass(_class(logger) or object, TensorBoardLogger | CSVLogger):
        arguments = logger.init_args
        runs = Path(arguments.save_dir) / (arguments.name or "")
        if arguments.version is not None:
            version = arguments.version
            folder = version if isinstance(version, str) else f"version_{version}"
            return runs / folder / "checkpoints"
    return (newest_run(runs) or runs) / "checkpoints"
