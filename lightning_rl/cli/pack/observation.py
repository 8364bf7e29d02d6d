"""The stages of an update, and the comparison of the same update made twice.

Checksums tell whether weights are equal, but not how far they are apart. So a pack also holds the
columns of the batch, the norm of each tensor's gradient in each optimizer step, and the norm of
each tensor's change, by which rounding is told from a fault.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.objective import Decision
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.rerun_recorder import outcome
from lightning_rl.cli.pack.archive import ABOUT
from lightning_rl.cli.pack.trees import write_tree
from lightning_rl.cli.rerun.compare import (
    CLOSE,
    NEAR_ZERO,
    IterationRerun,
    identical,
    rerun_iteration,
    within_rounding,
)
from lightning_rl.cli.rerun.rebuild import checkpoint_of
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.collect.loader import RolloutLoader, trainable
from lightning_rl.data.packing import packed_rows
from lightning_rl.data.rollouts.log import Outcome, first_difference
from lightning_rl.errors import DataError
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.run.files import strict_json
from lightning_rl.run.processes.dist import gather

_NOISE = 1e-5
"""A tensor's gradient below this share of the whole gradient is nothing but rounding: Adam makes
steps of full size of it.
"""


@dataclass
class Observation:
    """The stages of one update, in the order in which they arise.

    ``columns`` holds the columns (T,) of the batch before the update, those of one rank after those
    of another, ``gradients`` for each optimizer step the norm of each parameter's gradient, before
    clipping, and ``changes`` the norm of each parameter's change in the update.
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


@dataclass(frozen=True)
class BatchRow:
    """A row of a batch: the id of its rollout, and its tokens, of which the prompt's are first."""

    rollout: str
    prompt_length: int
    length: int


def place_in(rows: Sequence[BatchRow], index: int) -> str:
    """Return in words where a token of a batch is, counted from the end of its row's prompt."""
    for row in rows:
        if index < row.length:
            return f"rollout {row.rollout}, token {index - row.prompt_length}"
        index -= row.length
    raise IndexError(f"the batch ends {index + 1} tokens before this one")


def write_observed(
    about: dict[str, Any], parts: Path, seen: Observation, environment: dict[str, Any]
) -> None:
    """Write a pack's last members: what was observed in the update, and ``pack.json``."""
    write_tree(asdict(seen), parts / "expected")
    text = strict_json.dumps(about | {"environment": environment}, indent=1)
    (parts / ABOUT).write_text(text, encoding="utf-8")


class Observer(RLCallback):
    """Notes the stages of the update that is made."""

    def __init__(self) -> None:
        self.seen = Observation()
        self.rows: dict[str, list[BatchRow]] = {}
        """The rows of each policy's batch, by the policy's name."""
        self.parameters: list[list[str]] = []
        """The names of each optimizer's parameters, in its order."""
        self.before = Outcome(0, {})
        """The weights before the update."""
        self._before: dict[str, Tensor] = {}
        self._gradients: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = {name: full_tensor(p.detach()).clone() for name, p in _trained(pl_module)}
        self.before = outcome(trainer, self.rollout_module_of(pl_module), {})
        names = {p: name for name, p in pl_module.named_parameters()}
        self.parameters = [
            [names[p] for group in optimizer.param_groups for p in group["params"]]
            for optimizer in trainer.optimizers
        ]

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        name = self.policy_module_of(pl_module).name
        loader = trainer.train_dataloader
        assert isinstance(loader, RolloutLoader)
        packed = [rollout for rollout, _ in packed_rows(trainable(loader.current))]
        ids = list({id(rollout): rollout.id for rollout in packed}.values())  # by their numbers
        columns = (
            batch["rollouts", key].tolist() for key in ("rollout", "prompt_length", "length")
        )
        rows = [BatchRow(ids[number], *lengths) for number, *lengths in zip(*columns, strict=True)]
        own = {key: c.detach().cpu().clone() for key, c in batch["tokens"].items() if _is_column(c)}
        shares = gather((rows, own))  # of all ranks
        self.rows[name] = [row for rows, _ in shares for row in rows]
        for key in own:
            parts = [of_rank[key] for _, of_rank in shares if key in of_rank]
            if len(parts) == len(shares):
                self.seen.columns[f"{name}.{key}" if name else key] = torch.cat(parts)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After the last of a step, since clipping comes before on_before_optimizer_step, and would
        # spread what is wrong with one gradient over all.
        gradients = {n: full_tensor(p.grad) for n, p in _trained(pl_module) if p.grad is not None}
        self._gradients = _norms(gradients)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        own = {p for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, p in _trained(pl_module) if p in own]
        found = {name: self._gradients[name] for name in names if name in self._gradients}
        self.seen.gradients.append(found)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        now = {name: full_tensor(p.detach()) for name, p in _trained(pl_module)}
        self.seen.changes = _norms({name: now[name] - was for name, was in self._before.items()})


class Beginning(RLCallback):
    """Keeps the checkpoint with which training begins at ``version``, and makes no update then."""

    def __init__(self, version: int) -> None:
        self.version = version

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint = checkpoint_of(trainer)

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> Decision:
        return Decision(skip=self.policy_module_of(pl_module).present_iteration > self.version)


def _trained(module: LightningModule) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _norms(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Return the norm of each tensor, summed in float64."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(norms).tolist() if norms else [], strict=True))


@dataclass(frozen=True)
class Update:
    """An update that was made again: what was observed, and how its results compare."""

    observer: Observer
    rerun: IterationRerun

    @property
    def seen(self) -> Observation:
        """The stages."""
        return self.observer.seen


def made_again(run: RecordedRun, iteration: int) -> Update:
    """Make an update again, and observe it; raises as :func:`rerun_iteration` does."""
    observer = Observer()
    return Update(observer, rerun_iteration(run, iteration, observers=[observer]))


@dataclass(frozen=True)
class Stage:
    """A named part of the update: ``difference`` is relative, and ``near`` says whether rounding
    explains it. In a column the difference is largest at ``token``.
    """

    name: str
    difference: float
    near: bool
    token: int | None = None


def verdict(
    packed: Observation,
    seen: Observation,
    rerun: IterationRerun,
    rows: Mapping[str, Sequence[BatchRow]],
) -> tuple[str, bool]:
    """Return in words how an update compares with the packed one, and whether it is the same.

    ``equal to the bit`` is the judgement of :class:`IterationRerun`. Where that finds a difference,
    the stages tell whether it is rounding: all must agree to one part in a thousand. ``rows`` are
    those of each policy's batch, by the policy's name.
    """
    fault = first_fault(packed, seen, rerun)
    if fault is not None and fault.token is not None:
        policy = fault.name.removeprefix("column ").rpartition(".")[0]
        return f"different: {fault.name}, {place_in(rows[policy], fault.token)}", False
    if fault is not None:
        return f"different: {fault.name}", False
    if rerun.equal:
        return "equal to the bit", True
    largest = max(compared(packed, seen, rerun), key=lambda stage: stage.difference)
    name = largest.name
    if largest.difference == 0:  # of bits that no norm shows
        name = first_difference(rerun.recorded.weights, rerun.again.weights) or name
    return (
        f"equal to rounding (largest relative difference {largest.difference:.2g}, in {name})",
        True,
    )


def first_fault(packed: Observation, seen: Observation, rerun: IterationRerun) -> Stage | None:
    """Return the first stage that differs by more than rounding; None if there is none."""
    if rerun.diverged_at == rerun.kept.version:
        return Stage("the weights before the update", math.inf, False)
    return next((one for one in compared(packed, seen, rerun) if not one.near), None)


def compared(packed: Observation, seen: Observation, rerun: IterationRerun) -> Iterator[Stage]:
    """Yield all stages in the order in which they arise."""
    for name in {**packed.columns, **seen.columns}:
        yield compared_column(name, packed.columns.get(name), seen.columns.get(name))
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


def compared_column(name: str, was: Tensor | None, now: Tensor | None) -> Stage:
    """Compare the columns (T,) of two batches by their largest difference."""
    name = f"column {name}"
    if was is None or now is None or was.shape != now.shape:
        return Stage(name, math.inf, False)
    if not was.numel():
        return Stage(name, 0.0, True)
    apart = torch.where((was == now) | (was.isnan() & now.isnan()), 0.0, (was - now).abs())
    apart = apart.nan_to_num(nan=math.inf, posinf=math.inf)  # of NaN there is no largest
    token = int(apart.argmax())
    gap = float(apart[token])
    largest = float(was.abs().max())
    difference = gap / largest if gap and largest else gap
    near = gap <= NEAR_ZERO or difference <= CLOSE
    return Stage(name, difference, near, token)
