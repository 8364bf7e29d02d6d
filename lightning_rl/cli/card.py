"""The GPU that ``lightning-rl check`` plans for: the one given, or found."""

import math
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer

from lightning_rl.callbacks import WeightSync
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.lightning_flags import compute_dtype
from lightning_rl.memory_plan import CardPlan, MemoryPlan
from lightning_rl.module import PolicyModule

OPTION = "--gpu_memory_gb"


def card_of(arguments: Sequence[str]) -> tuple[float | None, list[str]]:
    """The GiB of a GPU that were given, and the other arguments.

    Raises:
        ConfigError: if they are no number above 0.
    """
    others = list(arguments)
    for place, argument in enumerate(others):
        name, equals, value = argument.partition("=")
        if name != OPTION:
            continue
        given = value if equals else "".join(others[place + 1 : place + 2])
        del others[place : place + (1 if equals else 2)]
        try:
            size = float(given)
        except ValueError:
            size = math.nan
        if not 0 < size < math.inf:
            raise ConfigError(f"{OPTION}={given!r} must be a number > 0, the GiB of one GPU")
        return size, others
    return None, others


def planned_device(trainer: Trainer, card_gb: float | None) -> torch.device:
    """What will compute: a GPU if one was given, else what the Trainer found."""
    return trainer.strategy.root_device if card_gb is None else torch.device("cuda")


def card_plan(
    module: PolicyModule, data: RLDataModule, memory: MemoryPlan, card_gb: float | None
) -> CardPlan | None:
    """For the GPU of rank 0, which has the most to hold; None without a GPU."""
    trainer, engine = module.trainer, data.engine
    device = planned_device(trainer, card_gb)
    if device.type != "cuda":
        return None
    card = int((card_gb or 0) * 2**30) or torch.cuda.get_device_properties(device).total_memory
    engine.follow_dtype(compute_dtype(trainer))
    assert module.policy is not None
    elements = sum(p.numel() for p in module.policy.lm.parameters())
    used, at_start = engine.memory_here(elements, card)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    transports = [c.transport for c in callbacks if isinstance(c, WeightSync)]
    kept = sum(transport.keeps_on_gpu for transport in transports)
    copy = kept * engine.weight_bytes(elements)
    return CardPlan(card, memory, used, at_start, copy, sleeps=engine.sleep_level is not None)
