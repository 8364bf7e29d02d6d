"""Verdicts on each argument and callback of Lightning's Trainer, for RL.

They are in one table, ``lightning_flags.yaml``: a run that uses something refused does not start,
and ``docs/api/lightning.md`` shows the table (written by ``python -m
tests.support.lightning_table``).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as theirs
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.errors import ConfigError


class Verdict(Enum):
    """A verdict on one of Lightning's flags or callbacks."""

    WORKS = "works"
    PARTLY = "partly"
    """Refused with some values."""
    WARNED = "warns"
    REFUSED = "refused"


@dataclass(frozen=True)
class FlagVerdict:
    """The verdict on a flag or callback, and its explanation.

    ``used`` takes the Trainer or the callback, and returns the value that is refused or warned
    about; None if there is none.
    """

    verdict: Verdict
    words: str
    used: Callable[[Any], Any]


def _unless(name: str, *harmless: Any) -> Callable[[Trainer], Any]:
    """Return the Trainer's attribute unless it has one of these values."""

    def used(trainer: Trainer) -> Any:
        value = getattr(trainer, name)
        return None if value in harmless else value

    return used


def _limit(name: str) -> Callable[[Trainer], Any]:
    """Return a limit on held-out batches, unless another flag set it."""

    def used(trainer: Trainer) -> Any:
        value = getattr(trainer, name)
        others = (trainer.fast_dev_run, trainer.overfit_batches)  # type: ignore[attr-defined]
        return None if value == 1 or value in filter(None, others) else value

    return used


def _validation_interval(trainer: Trainer) -> Any:
    seconds = trainer._val_check_time_interval  # type: ignore[attr-defined]
    if seconds is not None:
        return f"{seconds:g} s"
    value = trainer.val_check_interval
    return None if isinstance(value, float) and value == 1.0 else value


def _spawning(trainer: Trainer) -> Any:
    launcher = trainer.strategy.launcher
    spawns = getattr(launcher, "_start_method", None) == "spawn"
    return type(trainer.strategy).__name__ if spawns else None


def _foreign_precision(trainer: Trainer) -> Any:
    """Return the name of a precision plugin of Lightning that ``precision`` does not choose."""
    kind = type(trainer.precision_plugin)
    theirs = kind.__module__.startswith("lightning.")
    return kind.__name__ if theirs and kind not in _PRECISION_PLUGINS else None


_PRECISION_PLUGINS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")

_USED: dict[str, Callable[[Any], Any]] = {
    "strategy": _spawning,
    "precision": _unless("precision", *PRECISIONS),
    "limit_train_batches": lambda trainer: 0 if trainer.limit_train_batches == 0 else None,
    "limit_val_batches": _limit("limit_val_batches"),
    "limit_test_batches": _limit("limit_test_batches"),
    "limit_predict_batches": _limit("limit_predict_batches"),
    "val_check_interval": _validation_interval,
    "check_val_every_n_epoch": _unless("check_val_every_n_epoch", 1),
    "num_sanity_val_steps": _unless("num_sanity_val_steps", 0, 2),
    "accumulate_grad_batches": _unless("accumulate_grad_batches", 1),
    "gradient_clip_val": _unless("gradient_clip_val", None),
    "gradient_clip_algorithm": _unless("gradient_clip_algorithm", None),
    "plugins": _foreign_precision,
    "sync_batchnorm": lambda trainer: trainer._accelerator_connector._layer_sync and True,
    "reload_dataloaders_every_n_epochs": _unless("reload_dataloaders_every_n_epochs", 0),
    "model_registry": _unless("_model_registry", None),
    "ModelCheckpoint": lambda callback: callback._every_n_train_steps or None,
}
"""Flags and callbacks that are refused or warned about only for some uses; see
``FlagVerdict.used``.
"""


_SAID = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _entries(part: str) -> dict[str, FlagVerdict]:
    return {
        name: FlagVerdict(Verdict(verdict), words, _USED.get(name, lambda _: True))
        for name, said in _SAID[part].items()
        for verdict, words in said.items()
    }


TRAINER = _entries("trainer")
"""Every argument of ``Trainer.__init__``."""
CALLBACKS = _entries("callbacks")
"""Every callback that Lightning provides."""


def refuse_flags(trainer: Trainer) -> None:
    """Refuse a Trainer with arguments or callbacks that have no effect here, or another one.

    Raises:
        ConfigError: names the argument, its value, and what to set instead.
    """
    refuse_unasked_resuming(trainer)
    for message in _found(trainer, Verdict.REFUSED, Verdict.PARTLY):
        raise ConfigError(message)


def refuse_unasked_resuming(trainer: Trainer) -> None:
    """Refuse ``OnExceptionCheckpoint``, and prevent it from saving because of that refusal; also in
    supervised training.

    Raises:
        ConfigError: says what to use instead.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, theirs.OnExceptionCheckpoint):
            callbacks.remove(callback)
            name = type(callback).__name__
            raise ConfigError(
                f"trainer.callbacks: {name}: {CALLBACKS['OnExceptionCheckpoint'].words}"
            )


def warn_of_flags(trainer: Trainer) -> None:
    """Warn about arguments and callbacks that have no effect."""
    for message in _found(trainer, Verdict.WARNED):
        rank_zero_warn(message)


def refuse_precision(trainer: Trainer, *allowed: str) -> None:
    """Refuse a precision that is neither supported nor in ``allowed``; also in supervised training.

    Raises:
        ConfigError: names the supported ones.
    """
    if trainer.precision not in (*PRECISIONS, *allowed):
        raise ConfigError(f"trainer.precision={trainer.precision!r}: {TRAINER['precision'].words}")


def compute_dtype(trainer: Trainer) -> str:
    """Return the dtype in which the trainer multiplies matrices."""
    return "bfloat16" if trainer.precision.startswith("bf16-") else "float32"


def _found(trainer: Trainer, *verdicts: Verdict) -> Iterator[str]:
    """Yield messages about flags and callbacks in use that have one of these verdicts."""
    for name, entry in TRAINER.items():
        if entry.verdict in verdicts and (value := entry.used(trainer)) is not None:
            yield f"trainer.{name}={value!r}: {entry.words}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name, entry in CALLBACKS.items():
            used = entry.verdict in verdicts and isinstance(callback, getattr(theirs, name))
            if used and entry.used(callback) is not None:
                yield f"trainer.callbacks: {type(callback).__name__}: {entry.words}"


MOST_DEVICES = 4096
"""Maximum per machine: a Trainer makes an object for each, even if the device does not exist."""


def require_few_devices(devices: Any) -> None:
    """Refuse a number of processes that would only exhaust memory, before a Trainer is made.

    Raises:
        ConfigError: names it and the bound.
    """
    if str(devices).isdecimal() and int(devices) > MOST_DEVICES:
        raise ConfigError(f"trainer.devices={devices} must be <= {MOST_DEVICES}, per machine")
