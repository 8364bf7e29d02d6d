"""Hyper-parameters that a checkpoint can hold without pickled objects."""

import inspect
from typing import Any

from lightning.pytorch import LightningModule


def save_primitive_hparams(module: LightningModule) -> None:
    """``save_hyperparameters`` of the calling ``__init__``, less what ``weights_only`` refuses.

    Under the CLI all values are primitives (class paths and arguments); in code, objects such as
    an advantage are left out and have to be given to ``load_from_checkpoint`` again.
    """
    frame = inspect.currentframe()
    assert frame is not None
    module.save_hyperparameters(frame=frame.f_back)
    for name in [n for n, v in module.hparams.items() if not _primitive(v)]:
        del module.hparams[name]
        vars(module)["_hparams_initial"].pop(name, None)


def _primitive(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_primitive(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_primitive(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))
