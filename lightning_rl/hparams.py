"""Hyper-parameters that a checkpoint can hold without pickled objects."""

import inspect
from typing import Any

from lightning.pytorch import LightningModule

from lightning_rl.models.given import GivenModel


def save_primitive_hparams(module: LightningModule) -> None:
    """``save_hyperparameters`` of the calling ``__init__``, less what ``weights_only`` refuses.

    Under the CLI all values are primitives (class paths and arguments); in code, objects such as
    an advantage are left out and have to be given to ``load_from_checkpoint`` again.
    """
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    # Subclasses' arguments too. Lightning would stop at `configurable`, which stands between.
    while frame is not None and frame.f_locals.get("self") is module:
        if "__class__" in frame.f_locals:
            module.save_hyperparameters(frame=frame)
        frame = frame.f_back
    for name in [n for n, v in module.hparams.items() if not _primitive(v)]:
        del module.hparams[name]
        vars(module)["_hparams_initial"].pop(name, None)


def _primitive(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_primitive(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_primitive(v) for v in value)
    # A GivenModel's directory will be gone when a checkpoint is loaded.
    kinds = (bool, int, float, str)
    return value is None or (isinstance(value, kinds) and not isinstance(value, GivenModel))
