"""Callbacks that record rollouts: each chooses rollouts, and the fields to record."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from itertools import repeat
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.collect.loader import RolloutLoader, trainable
from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import select
from lightning_rl.data.packing import packed_rows
from lightning_rl.data.rollouts.files import Record, as_record
from lightning_rl.data.rollouts.jsonl import JSONLRollouts
from lightning_rl.data.rollouts.token_texts import TokenPieces, pieces_of
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.files.rundir import run_dir

COMPUTED = ("ref_logprobs", "advantages", "values", "returns")


class RolloutSelection(RLCallback, ABC):
    """Appends the rollouts that it chooses to the file ``NAME`` in the run directory.

    A new run appends to an existing file. A resumed run removes what was written after its
    checkpoint, since it will be written again.
    """

    NAME: ClassVar[str]
    language_only = True

    def __init__(self, every_n_iterations: int) -> None:
        self.every_n_iterations = every_n_iterations
        self._bytes = 0
        self._resumed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        file = run_dir(trainer) / self.NAME
        self._bytes = file.stat().st_size if file.exists() else 0
        self._resumed = False

    def is_due(self, iteration: int) -> bool:
        """Return True if this iteration is recorded; the first is 1."""
        return (iteration - 1) % self.every_n_iterations == 0

    @abstractmethod
    def choose(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return those of an iteration's rollouts that should be recorded."""

    def write(
        self,
        trainer: Trainer,
        iteration: int,
        rollouts: list[Rollout],
        more: Iterable[Record] | None = None,
    ) -> None:
        """Append rollouts of an iteration; ``more`` holds further fields of each.

        Raises:
            DiskError: if they cannot be written; then none of them is.
        """
        pairs = zip(rollouts, more or repeat({}), strict=False)
        records = ({"iteration": iteration} | as_record(r) | columns for r, columns in pairs)
        file = JSONLRollouts(run_dir(trainer) / self.NAME)
        if self._resumed:  # in another directory there is nothing to take back
            file.truncate(self._bytes)
        self._resumed = False
        file.pictures.write(rollouts)
        self._bytes = file.write(records)

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._bytes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._bytes, self._resumed = state_dict["bytes"], True


@configurable
class RolloutRecorder(RolloutSelection):
    """Appends rollouts to ``recorded.jsonl`` in the run directory; ``lightning-rl view`` shows it.

    A line is a rollout in the format of ``PreviewTable``, with the text of each token (``pieces``,
    ``prompt_pieces``) and lists as long as ``token_ids``: ``trainer_logprobs`` (with the weights
    before the update, at the sampling temperature), ``advantages`` and, if the algorithm has them,
    ``ref_logprobs``, ``values`` and ``returns``. A rollout that was not trained on has none. With
    several rows, each has its own.

    Logprobs that the update does not need are computed for it, in one forward pass over the
    recorded rollouts.

    Args:
        num_groups: whole groups per iteration; None: all. Rollouts that failed are always recorded.
        every_n_iterations: how often to record.

    Raises:
        ConfigError: if a value is below 1, or the batches do not come from an ``RLDataModule``.
    """

    NAME = "recorded.jsonl"

    def __init__(self, num_groups: int | None = 4, every_n_iterations: int = 1) -> None:
        require_at_least(1, num_groups=num_groups, every_n_iterations=every_n_iterations)
        super().__init__(every_n_iterations)
        self.num_groups = num_groups

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = self.rollout_module_of(pl_module)
        if module.roles:
            raise ConfigError(
                f"RolloutRecorder records one policy's numbers, but {len(module.policies)} "
                "policies learn here; use PreviewTable, and RerunRecorder for all rollouts"
            )
        tokenizer = module.tokenizer
        self._pieces = TokenPieces(
            lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        )

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        module = self.policy_module_of(pl_module)
        if not self.is_due(module.present_iteration):
            return
        collected = collected_rollouts(trainer)
        rows: defaultdict[str, list[int]] = defaultdict(list)
        for row, (rollout, _) in enumerate(packed_rows(trainable(collected))):
            rows[rollout.id].append(row)
        chosen = self.choose(collected)
        trained = [row for rollout in chosen for row in rows[rollout.id]]
        # On every rank: where weights are sharded, a forward pass takes all of them.
        columns = dict(zip(trained, token_columns(module, batch, trained), strict=True))
        if not trainer.is_global_zero:
            return
        told = (self._told(r, [columns[row] for row in rows[r.id]]) for r in chosen)
        self.write(trainer, module.present_iteration, chosen, told)

    def choose(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the first ``num_groups`` groups, and rollouts that cannot be trained on. Can be
        overridden.
        """
        groups = list(dict.fromkeys(rollout.group_id for rollout in rollouts))
        kept = set(groups[: self.num_groups])
        good = {rollout.id for rollout in trainable(rollouts)}
        return [r for r in rollouts if r.group_id in kept or r.id not in good]

    def _told(self, rollout: Rollout, columns: list[dict[str, list[float]]]) -> Record:
        """Return the rollout's rows as recorded, with further fields of each."""
        left = iter(columns)  # of rows with tokens; of none if it was not trained on
        rows = [
            record
            | pieces_of(self._pieces, record, row.prompt_ids, row.token_ids)
            | (next(left, {}) if row.token_ids else {})
            for record, row in zip(as_record(rollout)["rows"], rollout.rows, strict=True)
        ]
        return {"rows": rows}


def collected_rollouts(trainer: Trainer) -> list[Rollout]:
    """Return the rollouts from which the current batch was made, also after a resume.

    Raises:
        ConfigError: if the batch does not come from an ``RLDataModule``.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, RolloutLoader):
        raise ConfigError(
            f"RolloutRecorder records what an RLDataModule collects, not {type(loader).__name__}; "
            "remove it, or train with an RLDataModule"
        )
    return loader.current


@torch.no_grad()
def token_columns(
    module: PolicyModule, batch: TensorDict, rows: list[int]
) -> list[dict[str, list[float]]]:
    """Return numbers per completion token by column name, for each of the given rows."""
    batch, chosen = batch.copy(), torch.tensor(rows, dtype=torch.long)
    # The engine's where it is trusted, and zero where a rollout is left out of the update.
    partial = module.update.use_rollout_logprobs or module.skipped.zero_advantage
    if "old_logprobs" in batch["tokens"] and not partial:
        batch["tokens"]["trainer_logprobs"] = batch["tokens", "old_logprobs"]
    else:
        with module.clock("logprob"):
            budget = module.learner.max_tokens_per_micro_batch
            batch = module.loaded_policy.score(batch, "trainer_logprobs", budget, chosen)
    part = select(batch, chosen)
    names = [name for name in ("trainer_logprobs", *COMPUTED) if name in part["tokens"]]
    values = {name: part["tokens", name].tolist() for name in names}
    table, start = [], 0
    shape = part["rollouts"].select("prompt_length", "length")
    for prompt, length in zip(
        shape["prompt_length"].tolist(), shape["length"].tolist(), strict=True
    ):
        table.append({name: values[name][start + prompt : start + length] for name in names})
        start += length
    return table
