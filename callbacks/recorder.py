"""RolloutRecorder: rollouts with what training made of each of their tokens."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.collect.loader import RolloutLoader, trainable
from lightning_rl.config.arguments import configurable
from lightning_rl.data.packing import select
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.rundir import RunLines
from lightning_rl.view.flags import TokenPieces

COMPUTED = ("ref_logprobs", "advantages", "values", "returns")


@configurable
class RolloutRecorder(RLCallback):
    """Appends rollouts to ``recorded.jsonl`` in the run directory; ``lightning-rl view`` shows it.

    A line is a rollout as ``PreviewTable`` writes it, with the text of each token (``pieces``,
    ``prompt_pieces``) and lists as long as ``token_ids``: ``trainer_logprobs`` (of the weights
    before the update, at the sampling temperature), ``advantages`` and, where the algorithm has
    them, ``ref_logprobs``, ``values`` and ``returns``. A rollout that was not trained on has none.

    Logprobs that the update does not need are computed for it: one forward pass over the rollouts
    that are recorded.

    Args:
        num_groups: whole groups per iteration; None: all. Rollouts that failed are always recorded.
        every_n_iterations: how often.

    Raises:
        ConfigError: for values below 1, or if the batches do not come from an ``RLDataModule``.
    """

    def __init__(self, num_groups: int | None = 4, every_n_iterations: int = 1) -> None:
        require_at_least(1, num_groups=num_groups, every_n_iterations=every_n_iterations)
        self.num_groups = num_groups
        self.every_n_iterations = every_n_iterations
        self._lines = RunLines("recorded.jsonl")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._pieces: TokenPieces | None = None
        self._lines.begin(trainer)

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        module = self.module_of(pl_module)
        if module.iteration % self.every_n_iterations:
            return
        collected = collected_rollouts(trainer)
        rows = {rollout.id: row for row, rollout in enumerate(trainable(collected))}
        chosen = self.choose(collected)
        trained = [rollout for rollout in chosen if rollout.id in rows]
        # On every rank: where weights are sharded, a forward pass takes all of them.
        columns = token_columns(module, batch, [rows[rollout.id] for rollout in trained])
        if not trainer.is_global_zero:
            return
        of_rollout = dict(zip((r.id for r in trained), columns, strict=True))
        records = (self._record(module, r) | of_rollout.get(r.id, {}) for r in chosen)
        self._lines.append(trainer, records)

    def choose(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Whole groups, the first ``num_groups``, and what cannot be trained on. Override it."""
        groups = list(dict.fromkeys(rollout.group_id for rollout in rollouts))
        kept = set(groups[: self.num_groups])
        good = {rollout.id for rollout in trainable(rollouts)}
        return [r for r in rollouts if r.group_id in kept or r.id not in good]

    def state_dict(self) -> dict[str, Any]:
        return self._lines.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._lines.load_state_dict(state_dict)

    def _record(self, module: PolicyModule, rollout: Rollout) -> dict[str, Any]:
        if self._pieces is None:
            tokenizer = module.loaded_policy.tokenizer
            self._pieces = TokenPieces(
                lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            )
        return {
            "iteration": module.iteration,
            "id": rollout.id,
            **rollout.to_dict(),
            "pieces": self._pieces(rollout.token_ids),
            "prompt_pieces": self._pieces(rollout.prompt.token_ids),
        }


def collected_rollouts(trainer: Trainer) -> list[Rollout]:
    """What the batch in training was made of, also after a resume.

    Raises:
        ConfigError: if it does not come from an ``RLDataModule``.
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
    """For each of the given rollouts of a batch, a number per completion token by column name."""
    batch, chosen = batch.copy(), torch.tensor(rows, dtype=torch.long)
    # The engine's where it is trusted, and zero where a rollout is left out of the update.
    partial = module.trust_engine_logprobs or module.skips_zero_advantage
    if "old_logprobs" in batch["tokens"] and not partial:
        batch["tokens"]["trainer_logprobs"] = batch["tokens", "old_logprobs"]
    else:
        with module.clock("logprob"):
            budget = module.max_tokens_per_pack
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
