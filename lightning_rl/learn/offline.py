"""OfflineDataModule: training from recorded rollouts alone, without an engine."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_rl.collect.checks import check_groups
from lightning_rl.collect.collector import GroupFilter
from lightning_rl.collect.loader import RolloutLoader, limited_epoch
from lightning_rl.collect.replay_buffer import warn_if_uncorrected
from lightning_rl.config.arguments import configurable
from lightning_rl.data import teacher_logprobs
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.errors import ConfigError, DataError, require_at_least
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.models.pretrained import load_config
from lightning_rl.rollout import Group, Rollout, Row
from lightning_rl.run.files.metrics import summarize
from lightning_rl.run.files.resume import enter_directory
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.cores import share_cores
from lightning_rl.run.seeding import permutation, run_seed


class RecordedGroups:
    """Draws groups in a seeded order, pass after pass without end; a checkpoint keeps the place.

    Args:
        groups: the groups to draw from.
        shuffle: draw each pass in a new order, determined by ``seed``; False: keep the given order.
        seed: seed of the orders.
    """

    def __init__(self, groups: Sequence[Group], shuffle: bool, seed: int) -> None:
        self._groups = groups
        self._shuffle = shuffle
        self._seed = seed
        self._drawn = 0
        self._content = ""  # a checksum of it, when it is asked for
        self._lap = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

    def draw(self, count: int) -> list[Rollout]:
        """Return the rollouts of the next ``count`` groups; each draw of a group has its own id."""
        rollouts, size = [], len(self._groups)
        for _ in range(count):
            lap, position = divmod(self._drawn, size)
            if lap != self._lap:
                self._lap = lap
                self._order = list(range(size))
                if self._shuffle:
                    self._order = permutation(size, self._seed, lap).tolist()
            group = self._groups[self._order[position]]
            # Ids may repeat in a file of several runs, and a group in a batch that spans two laps.
            rollouts += [replace(r, group_id=f"{self._drawn}/{r.group_id}") for r in group]
            self._drawn += 1
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {"drawn": self._drawn} | self._identity()

    def _identity(self) -> dict[str, Any]:
        if not self._content:
            tokens = [[(r.token_ids, r.reward) for r in group] for group in self._groups]
            self._content = blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
        return {"groups": len(self._groups), "seed": self._seed, "content": self._content}

    def load_shares(self, states: Sequence[dict[str, Any]]) -> None:
        """Resume where the state was taken; any number of ranks draws the same groups.

        Raises:
            ConfigError: if the groups or their order have changed.
        """
        state = states[0]
        for name, now in self._identity().items():
            if state.get(name, now) != now:
                raise ConfigError(
                    f"the checkpoint's recorded rollouts had {name}={state[name]}, but now "
                    f"it is {now}; use the same file, filters and seed to resume"
                )
        self._drawn = state["drawn"]


@configurable
class OfflineDataModule(LightningDataModule):
    """Batches of groups from a rollout file, for a ``PolicyModule``; no engine, no ``WeightSync``.

    The rollouts are off-policy, increasingly so during training: they keep the logprobs of the
    engine that wrote them. With ``update.use_rollout_logprobs: true``, ``PPOClip`` limits how far
    the policy moves away from it; otherwise use a correction such as ``TokenTIS``. Rollouts that a
    teacher has read while they were recorded keep its logprobs, so ``TeacherDivergence`` learns
    from them as it does from new ones.

    Args:
        path: a ``.jsonl``, ``.parquet`` or ``.sqlite`` file, which is read into memory.
        groups_per_iteration: groups per batch.
        iterations_per_epoch: batches per epoch; None: the number of whole batches in the file.
        filters: groups rejected by any of them are left out.
        shuffle: use a new order in each pass over the file; False: the file's order.
        seed: seed of the orders; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        path: str,
        groups_per_iteration: int = 32,
        iterations_per_epoch: int | None = None,
        filters: list[GroupFilter] | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require_at_least(
            1, groups_per_iteration=groups_per_iteration, iterations_per_epoch=iterations_per_epoch
        )
        self.path = path
        self.groups_per_iteration = groups_per_iteration
        self.iterations_per_epoch = iterations_per_epoch
        self.filters = filters or []
        self.shuffle = shuffle
        self.seed = run_seed(seed)
        self._groups: RecordedGroups | None = None
        self._loader: RolloutLoader | None = None
        self._loader_state: dict[str, Any] | None = None

    # ---------------------------------------------------------------- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Read and check the file."""
        module = self._module()
        if stage != "fit":
            raise ConfigError(
                f"OfflineDataModule has recorded rollouts for 'fit' only, not for {stage!r}; use "
                "RLDataModule"
            )
        assert self.trainer is not None
        share_cores(self.trainer)
        enter_directory(self.trainer)
        check_groups(self.groups_per_iteration, module.update.minibatches)
        uses_rollout_logprobs = module.update.use_rollout_logprobs
        warn_if_uncorrected("recorded", module.objective, uses_rollout_logprobs)
        if self._groups is None:
            groups = self._read(module)
            if len(groups) < self.groups_per_iteration:
                raise ConfigError(
                    f"groups_per_iteration={self.groups_per_iteration} exceeds the {len(groups)} "
                    f"usable groups of {self.path}; lower it, or record more"
                )
            self._length = self.iterations_per_epoch or len(groups) // self.groups_per_iteration
            repeats = bool(self.trainer.overfit_batches)  # type: ignore[attr-defined]
            if repeats:
                groups = groups[: self._epoch() * self.groups_per_iteration]
            self._groups = RecordedGroups(groups, self.shuffle and not repeats, self.seed)

    def train_dataloader(self) -> RolloutLoader:
        module, groups = self._module(), self._groups
        assert groups is not None, "setup() comes first"
        self._loader = RolloutLoader(
            self.collect, groups, self._length, lambda: module.iteration, self._epoch()
        )
        if self._loader_state is not None:
            self._loader.load_state_dict(self._loader_state)
            self._loader_state = None
        return self._loader

    def _epoch(self) -> int:
        """Return the number of batches in an epoch, within the Trainer's limits."""
        assert self.trainer is not None
        return limited_epoch(self.trainer, self._length)

    def val_dataloader(self) -> Any:
        return []  # for the module's validation_step, which only RLDataModule feeds

    # Lightning restores a loader's own state only if the checkpoint was taken within an epoch.
    def state_dict(self) -> dict[str, Any]:
        return {"loader": None if self._loader is None else self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader_state = state_dict["loader"]

    # ---------------------------------------------------------------- reading

    def collect(self, iteration: int) -> list[Rollout]:
        """Return this rank's share of one iteration's recorded rollouts."""
        module, groups = self._module(), self._groups
        assert groups is not None, "setup() comes first"
        rollouts = groups.draw(self.groups_per_iteration)
        mean, std = summarize([r.reward for r in rollouts if r.reward is not None])
        tokens = summarize([float(r.length) for r in rollouts])[0]
        module.record({"reward/mean": mean, "reward/std": std, "rollout/tokens_mean": tokens})
        share = set(dist.shard(list(dict.fromkeys(r.group_id for r in rollouts))))
        return [r for r in rollouts if r.group_id in share]

    def _read(self, module: Any) -> list[Group]:
        recorded = open_rollouts(self.path).groups()
        smallest = module.advantage.min_group_size
        text_config = load_config(module.model, module.loading).get_text_config()
        groups = []
        for group in recorded:
            # Graded, and with tokens that a model wrote.
            usable = [r for r in group if r.graded and any(r.loss_mask) and not r.demonstration]
            _check_tokens(self.path, usable, text_config.vocab_size)
            if len(usable) >= smallest and all(f.keep(usable) for f in self.filters):
                groups.append(usable)
        if not groups:
            raise DataError(
                f"{self.path}: none of its {len(recorded)} groups has at least {smallest} "
                f"completed and graded rollouts, as {type(module.advantage).__name__} requires, "
                "and passes the filters; record more, or change the filters"
            )
        _check_teacher(self.path, module, [row for g in groups for r in g for row in r.rows])
        return groups

    def _module(self) -> Any:
        """Return the run's ``PolicyModule``."""
        module = None if self.trainer is None else self.trainer.lightning_module
        if not isinstance(module, RolloutModule) or "" not in module.policies:
            raise ConfigError(
                f"OfflineDataModule works with a PolicyModule, not {type(module).__name__}"
            )
        return module


def _check_teacher(path: str, module: Any, rows: Sequence[Row]) -> None:
    """Check that a teacher has read the rows, if the policy learns from one."""
    read = [teacher_logprobs.of_text(row.teacher_logprobs) for row in rows if row.teacher_logprobs]
    for key, part in (("advantage", module.advantage), ("loss", module.objective.loss)):
        if part.needs_teacher and not read:
            raise DataError(
                f"{path}: no teacher has read its rollouts, but model.{key}={type(part).__name__} "
                "learns from one; record them with a ModelTeacher or ServedTeacher in data.rewards"
            )
    if module.objective.loss.needs_teacher and not any(one.ids.shape[1] for one in read):
        raise DataError(
            f"{path} was recorded without its teacher's likeliest tokens, which model.loss="
            f"{type(module.objective.loss).__name__} needs; record with top_k, for example 16"
        )


def _check_tokens(path: str, rollouts: Sequence[Rollout], vocabulary: int) -> None:
    for rollout in rollouts:
        rows = [row for row in rollout.rows if row.token_ids]
        if not all(row.prompt_ids for row in rows):
            raise DataError(f"{path}: rollout {rollout.id!r} has a prompt without tokens")
        largest = max(max(row.prompt_ids + row.token_ids) for row in rows)
        if largest >= vocabulary:
            raise DataError(
                f"{path}: rollout {rollout.id!r} contains token {largest}, but model.model has "
                f"only {vocabulary} tokens; train the model that wrote the rollouts, or one with "
                "its tokenizer"
            )
