"""The stages of an update, and the comparison of the same update made twice.

Checksums tell whether weights are equal, but not how far they are apart. So a pack also holds the
columns of the batch, the norm of each tensor's gradient in each optimizer step, and the norm of
each tensor's change, by which rounding is told from a fault.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.cli.rerun.compare import (
    CLOSE,
    NEAR_ZERO,
    IterationRerun,
    identical,
    within_rounding,
)
from lightning_rl.data.rollouts.log import first_difference
from lightning_rl.errors import DataError
from lightning_rl.models.parallel.sharding import full_tensor

_NOISE = 1e-5
"""A tensor's gradient below this share of the whole gradient is nothing but rounding: Adam makes
steps of full size of it.
"""


@dataclass
class Observation:
    """The stages of one update, in the order in which they arise.

    ``columns`` holds the columns (T,) of the batch before the update, ``gradients`` for each
    optimizer step the norm of each parameter's gradient, before clipping, and ``changes`` the norm
    of each parameter's change in the update.
    """

    columns: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, float]] = field(default_factory=list)
    changes: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Any) -> "Observation":
        """Return the observation that a pack holds.

        Raises:
            DataError: if it is none.
        """
        names = {"columns", "gradients", "changes"}
        if isinstance(tree, dict) and tree.keys() == names:
            columns, gradients, changes = (
                tree[name] for name in ("columns", "gradients", "changes")
            )
            steps = gradients if isinstance(gradients, list) else [None]
            good = isinstance(columns, dict) and all(map(_is_column, columns.values()))
            if good and all(isinstance(norms, dict) for norms in (changes, *steps)):
                values = [value for norms in (changes, *steps) for value in norms.values()]
                if all(isinstance(value, float) for value in values):
                    return cls(columns, gradients, changes)
        raise DataError("the pack's expected.json holds no observation; ask for the pack again")


def _is_column(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 1


class Observer(RLCallback):
    """Notes the stages of the update that is made."""

    def __init__(self) -> None:
        self.seen = Observation()
        self._before: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = {name: full_tensor(p.detach()).clone() for name, p in _trained(pl_module)}

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        name = self.policy_module_of(pl_module).name
        for key, column in batch["tokens"].items():
            if _is_column(column):
                self.seen.columns[f"{name}.{key}" if name else key] = column.detach().cpu().clone()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        own = {p for group in optimizer.param_groups for p in group["params"]}
        gradients = {
            name: full_tensor(p.grad)
            for name, p in _trained(pl_module)
            if p in own and p.grad is not None
        }
        self.seen.gradients.append(_norms(gradients))

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        now = {name: full_tensor(p.detach()) for name, p in _trained(pl_module)}
        self.seen.changes = _norms({name: now[name] - was for name, was in self._before.items()})


def _trained(module: LightningModule) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _norms(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Return the norm of each tensor, summed in float64."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(norms).tolist() if norms else [], strict=True))


@dataclass(frozen=True)
class Stage:
    """A named part of the update: ``difference`` is relative, and ``near`` says whether rounding
    explains it.
    """

    name: str
    difference: float
    near: bool


def verdict(packed: Observation, seen: Observation, rerun: IterationRerun) -> tuple[str, bool]:
    """Return in words how an update compares with the packed one, and whether it is the same.

    ``equal to the bit`` is the judgement of :class:`IterationRerun`. Where that finds a difference,
    the stages tell whether it is rounding: all must agree to one part in a thousand.
    """
    if rerun.equal:
        return "equal to the bit", True
    if rerun.diverged_at == rerun.kept.version:
        return "different: the weights before the update", False
    stages = list(compared(packed, seen, rerun))
    fault = next((stage for stage in stages if not stage.near), None)
    if fault is not None:
        return f"different: {fault.name}", False
    largest = max(stages, key=lambda stage: stage.difference)
    name = largest.name
    if largest.difference == 0:  # of bits that no norm shows
        name = first_difference(rerun.recorded.weights, rerun.again.weights) or name
    return (
        f"equal to rounding (largest relative difference {largest.difference:.2g}, in {name})",
        True,
    )


def compared(packed: Observation, seen: Observation, rerun: IterationRerun) -> Iterator[Stage]:
    """Yield all stages in the order in which they arise."""
    for name in {**packed.columns, **seen.columns}:
        yield _column(f"column {name}", packed.columns.get(name), seen.columns.get(name))
    steps = max(len(packed.gradients), len(seen.gradients))
    noise: dict[str, bool] = {}
    for step in range(steps):
        was, now = (g[step] if step < len(g) else {} for g in (packed.gradients, seen.gradients))
        total = math.hypot(*filter(math.isfinite, was.values()))
        for name in {**was, **now}:
            noise[name] = noise.get(name, True) and was.get(name, math.inf) <= _NOISE * total
            where = f"gradient of {name} in optimizer step {step + 1}"
            yield _number(where, was.get(name), now.get(name), total)
    for name in {**packed.changes, **seen.changes}:
        if not noise.get(name, False):
            change = packed.changes.get(name)
            yield _number(f"change of {name}", change, seen.changes.get(name), change or 0.0)
    for name in rerun.again.metrics:
        before, after = rerun.recorded.metrics.get(name, math.nan), rerun.again.metrics[name]
        scale = max(abs(before), abs(after))
        difference = abs(before - after) / scale if math.isfinite(scale) and scale else 0.0
        yield Stage(f"metric {name}", difference, within_rounding(before, after))


def _number(name: str, was: float | None, now: float | None, scale: float) -> Stage:
    """Compare two norms, relative to ``scale``."""
    if was is None or now is None:
        return Stage(name, math.inf, False)
    if identical(was, now):
        return Stage(name, 0.0, True)
    difference = abs(was - now) / scale if scale else math.inf
    return Stage(name, difference, difference <= CLOSE)


def _column(name: str, was: Tensor | None, now: Tensor | None) -> Stage:
    """Compare the columns (T,) of two batches by their largest difference."""
    if was is None or now is None or was.shape != now.shape:
        return Stage(name, math.inf, False)
    apart = torch.where((was == now) | (was.isnan() & now.isnan()), 0.0, (was - now).abs())
    gap = float(apart.max()) if apart.numel() else 0.0
    largest = float(was.abs().max()) if was.numel() else 0.0
    difference = gap / largest if gap and largest else gap
    near = gap <= NEAR_ZERO or difference <= CLOSE
    return Stage(name, difference, near)
