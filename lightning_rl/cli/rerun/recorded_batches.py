"""A run's recorded iterations, as a data module to train on them again."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_rl.cli.rerun.change import UNCHANGED, RerunChange
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.collect.loader import RolloutLoader
from lightning_rl.errors import ConfigError
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.processes import dist


class RecordedBatches(LightningDataModule):
    """The recorded iterations after ``first``, instead of newly collected ones."""

    is_rerun = True
    skipped = False
    """True if the change leaves out all rollouts of the last batch, so that it makes no update."""

    def __init__(
        self,
        run: RecordedRun,
        first: int,
        count: int,
        data: LightningDataModule,
        change: RerunChange,
    ) -> None:
        super().__init__()
        self.run, self.first, self.count = run, first, count
        self.data, self.change = data, change

    @property
    def module(self) -> RolloutModule:
        """The module that is trained on the recorded iterations."""
        assert self.trainer is not None
        module = self.trainer.lightning_module
        assert isinstance(module, RolloutModule)
        return module

    def train_dataloader(self) -> RolloutLoader:
        module = self.module
        roles = list(module.roles)
        return RolloutLoader(self._read, self, self.count, lambda: module.iteration, None, roles)

    def load_shares(self, states: Sequence[dict[str, Any]]) -> None:
        """Do nothing: every iteration is read by its number."""

    def val_dataloader(self) -> Any:
        return []

    def _read(self, place: int) -> list[Rollout]:
        iteration = self.first + place + 1
        rollouts = self.run.log.rollouts(iteration, dist.rank())
        if self.change == UNCHANGED:
            return rollouts
        rollouts = self.change.apply(rollouts, self.data)
        groups = dist.gather(len({r.group_id for r in rollouts if r.graded}))
        self.skipped = not any(groups)
        if self.skipped:
            return self.run.log.rollouts(iteration, dist.rank())  # for a batch, not trained on
        least = max(policy.update.minibatches for policy in self.module.policies.values())
        if 0 in groups or sum(groups) < least:
            raise ConfigError(
                f"{self.change}: leaves too few groups of iteration {iteration}, "
                f"{' + '.join(map(str, groups))} on {len(groups)} ranks: its update takes one or "
                f"more on each, and {least} or more for its minibatches; leave out fewer rollouts, "
                f"or the whole iteration (--without {iteration})"
            )
        return rollouts
