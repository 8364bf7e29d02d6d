"""Collects a small batch outside of training; changes neither module nor data module."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer

from lightning_rl.callbacks.preview import as_markdown, preview_table
from lightning_rl.collect.loader import LazyLoader, trainable
from lightning_rl.collect.peek import Peek
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.clock import StageClock
from lightning_rl.run.known_warnings import without_info
from lightning_rl.run.seeding import gather_random_states, restore_random_states


def peek(data: RLDataModule, module: RolloutModule, groups: int, group_size: int) -> Peek:
    """Do what :meth:`RLDataModule.peek` does, in a Trainer that keeps nothing."""
    for part in (data.trainer, module._trainer):
        if part is not None and part.state.status == "running":
            raise ConfigError(
                "peek works before or after a run, but this one is running; in a callback use "
                "the rollouts that on_collect_end gets"
            )
    with _unchanged(module) as own_module:
        rollouts = _collect(data, own_module, groups, group_size)
        columns, rows = preview_table(rollouts, lambda ids: str(own_module.tokenizer.decode(ids)))
    batch = pack_rollouts(trainable(rollouts), rollouts, list(module.roles))
    return Peek(rollouts, batch, columns, rows, as_markdown(columns, rows))


def _collect(
    data: RLDataModule, module: RolloutModule, groups: int, group_size: int
) -> list[Rollout]:
    """Return graded rollouts of a data module with the same parts, except what a run writes to."""
    states, data = gather_random_states(), copy.copy(data)
    data.trainer, data.buffer = None, None

    def first(_: int) -> list[Rollout]:
        prompts = data.train_prompts.first(groups)
        return data.collection.pipeline.run(prompts, group_size, data.sampling, data.seed)

    data.predict_series = LazyLoader(first, 1)
    with tempfile.TemporaryDirectory(prefix="lightning_rl_") as scratch, without_info():
        trainer = Trainer(
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=scratch,
        )
        try:
            [rollouts] = trainer.predict(module, datamodule=data) or []
        finally:
            restore_random_states(states)
    return list(rollouts)


@contextmanager
def _unchanged(module: RolloutModule) -> Iterator[RolloutModule]:
    """Yield the module, or a copy if it is not loaded yet; afterwards it is as it was."""
    if not all(policy.policy is not None for policy in module.policies.values()):
        trainer = module._trainer  # of a run that failed before it was loaded
        yield copy.deepcopy(module, {id(trainer): None})
        return
    before = vars(module) | {"_modules": dict(module._modules)}
    module._recorded, module.clock = {}, StageClock()
    try:
        yield module
    finally:
        vars(module).clear()
        vars(module).update(before)
