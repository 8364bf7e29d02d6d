"""A change of a rerun: rollouts that are left out, and settings of the update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from lightning_rl.cli.rerun.run import RecordedRun, config_in
from lightning_rl.collect.pipeline import in_groups
from lightning_rl.config.layers import SPEC, flatten
from lightning_rl.data.rollouts.parquet import ParquetRollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rollout import Rollout, RolloutStatus

_OF_SAMPLING = ("model", "lora", "vision", "loading", "roles")
"""Arguments of the module that change which policy samples."""
_WEIGHTS, _FILTERS = ["data", "reward_weights"], ["data", "selection", "filters"]
"""What the update gets from the data module and can be computed again from recorded rollouts."""


@dataclass(frozen=True)
class RerunChange:
    """What a rerun does differently from the record; the default is nothing.

    Args:
        without: ids of rollouts to leave out, or beginnings of ids that end before a slash: ``11``
            is what was sampled for iteration 11, ``11/3`` the group in its place 3.
        settings: ``KEY=VALUE`` of the configuration.
        unpaid: names of parts of the reward that count nothing.
    """

    without: Sequence[str] = ()
    settings: Sequence[str] = ()
    unpaid: Sequence[str] = ()

    def __str__(self) -> str:
        left_out = [*self.without, *(f"the reward {name}" for name in self.unpaid)]
        parts = [f"without {', '.join(left_out)}"] if left_out else []
        return "; ".join([*parts, *self.settings])

    def require_supported(self, run: RecordedRun, version: int) -> None:
        """Check that the settings change the update alone, and that the record has what it takes.

        Raises:
            ConfigError: naming the first setting that changes more.
            DataError: if the run's own filters rejected groups, which were not recorded.
        """
        for setting in self.settings:
            key = setting.partition("=")[0]
            parts = _parts(key)
            of_update = parts[0] == "model" and parts[1:2] and parts[1] not in _OF_SAMPLING
            if not of_update and parts not in (_WEIGHTS, _FILTERS):
                raise ConfigError(
                    f"--set {setting}: {key} decides what was sampled, or how it is computed, and "
                    "not the update alone, so the recorded rollouts would not be those of such a "
                    "run; a rerun can set model.* (but not "
                    f"{', '.join(f'model.{name}' for name in _OF_SAMPLING)}), data.reward_weights "
                    "and data.selection.filters"
                )
        if self._sets(_FILTERS):
            table = flatten(config_in(run.config_of(version)[1]))
            own = [k for k, value in table.items() if k.startswith("data.selection.filters.")]
            if own or table.get("data.selection.filters"):
                raise DataError(
                    "--set data.selection.filters: the groups that the run's own filters rejected "
                    "were not recorded, so others cannot choose among them; leave groups out by "
                    "--without"
                )

    def leaves_out(self, rollout: Rollout) -> bool:
        """Return True if the rollout's id is named, or begins with what is."""
        return any(f"{rollout.id}/".startswith(f"{name.rstrip('/')}/") for name in self.without)

    def left_out(self, run: RecordedRun, iterations: Sequence[int]) -> dict[int, int]:
        """Count the rollouts that are left out, by the iterations that trained on any of them."""
        counts = {}
        for iteration in iterations if self.without else ():
            files = map(ParquetRollouts, run.log.files_of(iteration))
            found = sum(self.leaves_out(r.rollout) for file in files for r in file.read())
            if found:
                counts[iteration] = found
        return counts

    def apply(self, rollouts: list[Rollout], data: Any) -> list[Rollout]:
        """Mark rollouts that are not trained on as SKIPPED, and weigh rewards anew; in place.

        Those that are skipped stay in the list, so that all groups keep their numbers, by which
        they are dealt to minibatches.

        Args:
            rollouts: all that an iteration was trained on, on one rank.
            data: the run's data module, built with the settings.

        Raises:
            DataError: if the rewards of these rollouts do not follow from their recorded parts.
        """
        if self._sets(_WEIGHTS):
            for rollout in rollouts:
                if rollout.reward is not None:
                    _weigh(rollout, _with_rewards(data).task_of(rollout.prompt).rewards.weights)
        for rollout in rollouts if self.unpaid else ():
            if rollout.reward is not None:
                weights = rollout.reward_weights
                _weigh(rollout, {n: 0.0 if n in self.unpaid else w for n, w in weights.items()})
        skipped = [rollout for rollout in rollouts if self.leaves_out(rollout)]
        if self._sets(_FILTERS):
            filters = _with_rewards(data).selection.filters or []
            for group in in_groups(rollouts):
                if not (group[0].demonstration or all(one.keep(group) for one in filters)):
                    skipped += group
        for rollout in skipped:
            rollout.status = RolloutStatus.SKIPPED
        return rollouts

    def _sets(self, wanted: list[str]) -> bool:
        return any(_parts(setting.partition("=")[0]) == wanted for setting in self.settings)


UNCHANGED = RerunChange()


def _parts(key: str) -> list[str]:
    """Split a key; those of a policy among several are as those of a run's only one."""
    parts = [part for part in key.lstrip("-").split(".") if part not in SPEC]
    return ["model", *parts[3:]] if parts[:2] == ["model", "policies"] else parts


def _with_rewards(data: Any) -> RLDataModule:
    if not isinstance(data, RLDataModule):
        raise DataError(
            f"{type(data).__name__} has neither reward weights nor filters; change model.* instead"
        )
    return data


def _weigh(rollout: Rollout, weights: Mapping[str, float]) -> None:
    """Set a rollout's reward to the sum of its recorded parts by other weights."""
    parts = {name: rollout.reward_parts.get(name) for name in weights}
    scores = {name: score for name, score in parts.items() if score is not None}
    then = fsum(rollout.reward_weights.get(name, 1.0) * score for name, score in scores.items())
    own = bool(rollout.role_rewards) or any(call.reward is not None for call in rollout.calls)
    if own or rollout.reward != then:
        raise DataError(
            f"data.reward_weights: the reward of rollout {rollout.id} is not the weighted "
            f"sum of its recorded parts ({rollout.reward} recorded, {then} summed"
            f"{', and roles or calls have rewards of their own' if own else ''}), so other weights "
            "do not tell what it would be"
        )
    rollout.reward = fsum(weights[name] * score for name, score in scores.items())
    rollout.reward_weights = dict(weights)
