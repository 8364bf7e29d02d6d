"""The disk plan: the files that a run keeps, and when there is no more room for them."""

import shutil
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_rl.callbacks import HFExport, IterationCheckpoint, RerunRecorder
from lightning_rl.cli.app import planned_iterations
from lightning_rl.cli.check.memory import in_units
from lightning_rl.datamodule import RLDataModule
from lightning_rl.learn.optimizer_state import state_bytes
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.run.hooks import find_callbacks, use_own_saver

_PER_TOKEN = 9
"""Bytes of a recorded token, as RerunRecorder says."""
_ENDLESS = 10**6
"""Iterations of a run without an end."""


@dataclass(frozen=True)
class Kept:
    """Files of one kind: ``size`` bytes each, a new one every so many iterations.

    At most ``count`` exist at once, with the one that is being written; None: all are kept.
    """

    kind: str
    size: int
    every: int
    count: int | None

    def at(self, iteration: int) -> int:
        """Return the bytes at the end of an iteration, while the newest is being written."""
        written = iteration // self.every
        return self.size * (written if self.count is None else min(written, self.count))

    def __str__(self) -> str:
        if self.count is None:
            return f"{self.kind} of at most {self.size / 2**10:,.0f} KiB an iteration"
        times = "once" if self.count == 1 else f"at most {self.count} at once"
        return f"{self.kind} of {in_units(self.size)}, {times}"


@dataclass(frozen=True)
class DiskPlan:
    """The files that a run keeps on a disk with ``free`` bytes.

    ``iterations`` is the run's length; None: it does not say.
    """

    kept: list[Kept]
    iterations: int | None
    free: int

    @property
    def full_at(self) -> int | None:
        """The first iteration that has no room; None if there is none."""
        last = self.iterations or _ENDLESS
        first = bisect_right(range(last + 1), self.free, key=self._bytes)
        return first if first <= last else None

    def _bytes(self, iteration: int) -> int:
        return sum(each.at(iteration) for each in self.kept)

    def lines(self) -> Iterator[str]:
        """Yield lines of text for the user."""
        if not self.kept:
            return
        yield "disk:"
        yield from (f"  {each}" for each in self.kept)
        if self.iterations is not None:
            needed = in_units(self._bytes(self.iterations))
            yield f"  after {self.iterations:,} iterations {needed}; {in_units(self.free)} are free"
        if self.full_at is not None:
            yield (
                f"  WARNING: the disk is full in iteration {self.full_at:,}; keep fewer "
                "checkpoints (IterationCheckpoint keep_last), or write elsewhere "
                "(trainer.default_root_dir)"
            )


def disk_plan(
    module: RolloutModule, data: RLDataModule, place: Path, logged: bool, prompt: int
) -> DiskPlan:
    """Plan the files of a run.

    Args:
        module: the module, configured.
        data: what it trains on.
        place: the folder that the run writes to; it need not be there yet.
        logged: whether the run has a logger.
        prompt: tokens of the longest prompt.
    """
    trainer = module.trainer
    iterations = planned_iterations(trainer, data) or None
    end = iterations or _ENDLESS
    kept = []
    use_own_saver(trainer)  # as a run does
    for saver in find_callbacks(trainer, IterationCheckpoint):
        best = 0 if saver.monitor is None else saver.keep_best
        kept.append(_kept("checkpoints", _checkpoint(module), saver, best, end))
    for export in find_callbacks(trainer, HFExport):
        best = 0 if export.monitor is None else 1
        kept.append(_kept("exports", _export(module, export), export, best, end))
    # A run with a logger has the callback by default.
    if logged and all(recorder.rollouts for recorder in find_callbacks(trainer, RerunRecorder)):
        tasks = data.train_tasks
        longest = max(task.group_size * (prompt + task.sampling.max_tokens) for task in tasks)
        size = data.groups_per_iteration * longest * _PER_TOKEN
        kept.append(Kept("recorded rollouts", size, 1, None))
    there = next(folder for folder in [place, *place.absolute().parents] if folder.exists())
    return DiskPlan(kept, iterations, shutil.disk_usage(there).free)


def _kept(kind: str, size: int, saver: IterationCheckpoint | HFExport, best: int, end: int) -> Kept:
    """Return what a callback keeps, with one that is being written; 0: only at the run's end."""
    every = saver.every_n_iterations
    return Kept(kind, size, every or end, saver.keep_last + best + 1 if every else 1)


def _checkpoint(module: RolloutModule) -> int:
    """Return the bytes of a checkpoint: weights, without a LoRA's base, and the optimizers."""
    size = sum(p.nbytes for p in module.checkpointed_parameters())
    for policy in module.policies.values():
        trained = [p.shape for p in policy.loaded_policy.parameters() if p.requires_grad]
        size += state_bytes(policy.optimizer, trained, torch.float32)[1]
    return size


def _export(module: RolloutModule, export: HFExport) -> int:
    """Return the bytes of the policies as exports hold them: whole, or their adapters alone."""
    size = 0
    for policy in (learner.loaded_policy for learner in module.policies.values()):
        apart = policy.lora is not None and not export.merge_adapters
        size += sum(p.nbytes for p in policy.lm.parameters() if p.requires_grad or not apart)
    return size
