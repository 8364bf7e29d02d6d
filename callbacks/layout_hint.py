"""A word to a script whose run would be faster in another layout of the same machine."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.config.layers import described
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import default_engine
from lightning_rl.module import PolicyModule
from lightning_rl.run import layout_cache
from lightning_rl.run.device_layout import CLOSE, DeviceLayout, fastest, layouts_of
from lightning_rl.run.hooks import datamodule_of
from lightning_rl.run.machine import usable_cores
from lightning_rl.run.resume import configured_as


class LayoutHint(RLCallback):
    """Says once, as a script begins to train, how much faster an earlier run was on this machine.

    Nothing is measured: it reads what ``fit`` and ``check --layout`` have measured of the same
    model and batch, and is silent where there is nothing, or where the command line has chosen.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and trainer not in configured_as:
            line = hint(trainer, pl_module)
            if line is not None:
                rank_zero_info(line)


def hint(trainer: Trainer, module: LightningModule) -> str | None:
    """What to change, and how much faster that was; None where nothing is known to be faster."""
    data = datamodule_of(trainer)
    if not isinstance(data, RLDataModule) or not isinstance(module, PolicyModule):
        return None
    if trainer.strategy.root_device.type != "cpu":
        return None
    layouts = layouts_of(usable_cores(), data.groups_per_iteration, plain=True)
    table, engine = described(module, data, trainer), type(data.engine)
    for generates in dict.fromkeys((engine, type(default_engine()))):
        key = layout_cache.key_of(table, generates.__name__)
        known = None if key is None else layout_cache.read(key)
        if known is None:
            continue
        seconds = {
            layout: known.seconds[layout.name]["iteration"]
            for layout in layouts
            if layout.name in known.seconds
        }
        here = _present(trainer, layouts, plain=engine is not generates)
        if here in seconds and seconds[best := fastest(seconds)] * CLOSE < seconds[here]:
            return (
                f"layout: {best.name} took {seconds[best]:.3g} s per iteration on this machine, "
                f"{here.name}, as here, {seconds[here]:.3g} s: {_advice(best)}"
            )
    return None


def _present(trainer: Trainer, layouts: list[DeviceLayout], plain: bool) -> DeviceLayout | None:
    """The layout that the script has chosen."""
    processes, threads = str(trainer.world_size), str(torch.get_num_threads())
    for layout in layouts:
        sized = (layout.flags[1], layout.environment["OMP_NUM_THREADS"]) == (processes, threads)
        if sized and ("--data.engine" in layout.flags) == plain:
            return layout
    return None


def _advice(layout: DeviceLayout) -> str:
    """What a script has to say for it."""
    parts = [
        f"OMP_NUM_THREADS={layout.environment['OMP_NUM_THREADS']}",
        f"Trainer(devices={layout.flags[1]})",
    ]
    if "--data.engine" in layout.flags:
        parts.append("RLDataModule(engine=TransformersEngine())")
    return ", ".join(parts)
