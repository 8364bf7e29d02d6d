"""LearningAlarms: warns when a policy gets worse instead of better. On by default.

It is no guard, as it is part of every run: it records no metrics and acts on nothing, and its kinds
look at the same samples of the run.
"""

import logging
import math
from collections import defaultdict
from dataclasses import astuple, dataclass
from itertools import compress
from typing import Any, TypeGuard

from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.idle import Idle
from lightning_rl.callbacks.reward_hacking import RewardHacking, component_weights
from lightning_rl.callbacks.samples import FirstAndLast, Sample, Scores, Stateful
from lightning_rl.config.arguments import configurable
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import require_at_least
from lightning_rl.learn.base import RecordingModule
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.hooks import datamodule_of

_log = logging.getLogger(__name__)

FINITE = ("policy/loss", "policy/grad_norm", "policy/kl_old", "policy/entropy", "reward/mean")
UNLEARNS = (
    "The policy is getting worse: lower the learning rate, ppo_epochs or minibatches, add a KL "
    "penalty (model.kl), and read some rollouts"
)
ARRIVED = 0.2
"""Share of the range of rewards seen: this close to the best, a policy need not explore any more.
"""
LEAST_GROUPS = 16
"""With fewer groups, the standard error cannot be estimated well enough."""
IDLE = 3
"""Iterations in a row without learning: one or two of them happen in healthy runs."""


def _rewards_compare(datamodule: object) -> TypeGuard[RLDataModule]:
    """Return True if the rewards of different iterations can be compared.

    They cannot if prompts are chosen by the rewards that they got.
    """
    return (
        isinstance(datamodule, RLDataModule)
        and type(datamodule.train_prompts).observe is PromptDataset.observe
    )


def _fell(what: str, before: Sample, now: Sample, sigmas: float, since: str) -> str | None:
    """Return a warning if a mean is lower than chance explains; else None."""
    bound = before.lowest(now, sigmas)
    if not now.mean < bound:
        return None
    return (
        f"{what} is {now.mean:.3g}, below the {before.mean:.3g} of {since} (bound {bound:.3g}, the "
        f"least that chance explains). {UNLEARNS}"
    )


def _held_out(trainer: Trainer, metrics: dict[str, float]) -> dict[str, Sample]:
    """Return success rate and mean reward of held-out prompts, if they were just evaluated."""
    data = datamodule_of(trainer)
    if not isinstance(data, RLDataModule) or data.evaluation is None:
        return {}
    if "eval/reward_mean" not in metrics:
        return {}
    prompts = len(data.held_out.groups())
    reward = Sample(metrics["eval/reward_mean"], metrics["eval/reward_std"], prompts)
    if "eval/accuracy" not in metrics:
        return {"eval/reward_mean": reward}
    accuracy = Sample.of_share(metrics["eval/accuracy"], prompts)
    return {"eval/accuracy": accuracy, "eval/reward_mean": reward}


@configurable
@dataclass(eq=False, repr=False)
class LearningAlarms(Stateful, RLCallback):
    """Warns, once for each kind, of problems in a run that learns; ``fit`` adds it by itself.

    - *rewards*: the mean reward of the last ``window`` iterations is below that of the first, by
      more than ``reward_sigmas`` standard errors; off if prompts are chosen by the rewards they
      got (curricula), since rewards of different iterations are then not comparable.
    - *evaluation*: held-out accuracy or mean reward is below that of the first evaluation, by more
      than ``eval_sigmas`` standard errors.
    - *gaming*: a part of the reward that matters, or held-out accuracy, falls though the mean
      reward does not (:mod:`lightning_rl.callbacks.reward_hacking`).
    - *entropy*: the mean of -log p of sampled tokens is below ``entropy_share`` of its first value,
      although rollouts have had rewards far above the mean.
    - *gap*: the logprobs of engine and trainer are more than ``gap`` nats apart.
    - *numbers*: loss, gradient or mean reward are NaN or infinite, or steps were skipped for that.
    - *learning*: nothing was learned in three iterations in a row.

    Alarms are repeated in the last line and the ``summary.json`` of ``RunReport``.

    Rollouts of a group are not independent, so a standard error is that of the means of groups, or
    of held-out prompts. A fall must also be at least a fifth of their standard deviation. To act
    instead of only warning, use guards.

    Args:
        window: iterations that are averaged at either end; more if there are few groups.
        reward_sigmas: in standard errors; checked in every iteration.
        eval_sigmas: in standard errors; checked in evaluations, of which there are fewer.
        entropy_share: in (0, 1).
        gap: mean distance per token, in nats.

    Raises:
        ConfigError: if a value is out of range.
    """

    state_names = "rewards", "entropies", "gaps", "gaming", "first_evaluation", "idle", "told"
    window: int = 3
    reward_sigmas: float = 4.0
    eval_sigmas: float = 3.0
    entropy_share: float = 0.05
    gap: float = 0.3

    def __post_init__(self) -> None:
        require_at_least(1, window=self.window)
        others = ("reward_sigmas", "eval_sigmas", "entropy_share", "gap")
        require_at_least(0, **{name: getattr(self, name) for name in others})
        self.rewards = Scores(self.window, LEAST_GROUPS)
        self.entropies, self.gaps = FirstAndLast(self.window), FirstAndLast(self.window)
        self.gaming = RewardHacking(self.rewards, self.reward_sigmas, self.eval_sigmas)
        self.first_evaluation: dict[str, list[Any]] = {}
        self.idle = Idle()
        self.told: dict[str, str] = {}
        """What each kind of alarm that has gone off said, with its iteration."""

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        datamodule = datamodule_of(trainer)
        if not isinstance(datamodule, RLDataModule):  # recorded rollouts are not this policy's
            return
        self.idle.look_at_rollouts(datamodule.generated, datamodule.train_tasks)
        # Also those that filters rejected: which ones that are changes as the policy does.
        groups: dict[str, list[float]] = defaultdict(list)
        for rollout in datamodule.generated:
            if rollout.reward is not None:
                groups[rollout.group_id].append(rollout.reward)
        if not groups:
            return
        self.rewards.add_groups(groups.values())
        self.gaming.add(datamodule.generated)
        written = [p for r in rollouts for p in compress(r.logprobs, r.loss_mask)]
        if written:
            self.entropies.add([-sum(written) / len(written)])

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        if isinstance(pl_module, PolicyModule):
            self.idle.look_at_batch(pl_module, batch)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        module = self.module_of(pl_module)
        gaps = [metrics[n] for n in module.names_of("rollout/logprob_gap_mean") if n in metrics]
        if gaps:
            self.gaps.add([max(gaps)])
        self.idle.end_iteration(module, metrics)
        held_out = _held_out(trainer, metrics)
        found = {
            "learning": self._learning(),
            "numbers": self._numbers(module, metrics),
            "rewards": self._rewards(trainer),
            "evaluation": self._evaluation(held_out),
            "gaming": self._gaming(trainer, held_out),
            "entropy": self._entropy(),
            "gap": self._gap(),
        }
        for kind, message in found.items():
            if message is not None and kind not in self.told:
                self.told[kind] = f"iteration {module.iteration}: {message}"
                if trainer.is_global_zero:
                    _log.warning("LearningAlarms (%s), %s", kind, self.told[kind])

    def summed_up(self) -> dict[str, str]:
        """Return the alarms of the whole run, by kind."""
        if "learning" not in self.told:
            return dict(self.told)
        count = f"nothing was learned in {self.idle.total} of {self.idle.iteration} iterations"
        return self.told | {"learning": f"{count}: {self.idle.reason}"}

    # ---------------------------------------------------------------- the kinds

    def _learning(self) -> str | None:
        if self.idle.in_a_row < IDLE:
            return None
        return (
            f"nothing was learned in {self.idle.in_a_row} iterations in a row: {self.idle.reason}. "
            "Read some rollouts, and see 'Nothing is learned' in docs/troubleshooting.md"
        )

    def _numbers(self, module: RecordingModule, metrics: dict[str, float]) -> str | None:
        # Other metrics may be NaN: of a reward that applied to no rollout, say.
        watched = [name for metric in FINITE for name in module.names_of(metric)]
        bad = [name for name in watched if not math.isfinite(metrics.get(name, 0.0))]
        skipped = module.names_of("policy/nonfinite_skipped")
        bad += [name for name in skipped if metrics.get(name, 0.0) > 0]
        if not bad:
            return None
        return (
            f"{', '.join(f'{name} is {metrics[name]:g}' for name in bad)}. Lower the learning "
            "rate, and look at the rollouts of this iteration for extreme rewards or logprobs"
        )

    def _rewards(self, trainer: Trainer) -> str | None:
        if not self.rewards.full or not _rewards_compare(datamodule_of(trainer)):
            return None
        first, last = self.rewards.iterations
        what = f"the mean reward of the last {last} iterations"
        return _fell(what, *self.rewards.both, self.reward_sigmas, f"the first {first}")

    def _evaluation(self, held_out: dict[str, Sample]) -> str | None:
        if not self.first_evaluation:
            self.first_evaluation = {name: [*astuple(now)] for name, now in held_out.items()}
        for name in [name for name in held_out if name in self.first_evaluation]:
            before, now = Sample(*self.first_evaluation[name]), held_out[name]
            what = f"{name} of {now.count} prompts"
            if message := _fell(what, before, now, self.eval_sigmas, "the first evaluation"):
                return message
        return None

    def _gaming(self, trainer: Trainer, held_out: dict[str, Sample]) -> str | None:
        datamodule = datamodule_of(trainer)
        if not _rewards_compare(datamodule):
            return None
        messages = (self.gaming.part_fell(component_weights(t)) for t in datamodule.train_tasks)
        if result := next(filter(None, messages), None):
            return result
        accuracy = held_out.get("eval/accuracy")
        return None if accuracy is None else self.gaming.accuracy_fell(accuracy)

    def _entropy(self) -> str | None:
        if not self.entropies.full or not self.rewards.full:
            return None
        before, now = (sample.mean for sample in self.entropies.both)
        reward, (low, high) = self.rewards.both[1].mean, self.rewards.range
        arrived = high - reward <= ARRIVED * (high - low)
        if not 0 <= now < self.entropy_share * before or arrived:
            return None
        return (
            f"the entropy per token is {now:.3g} nats, {now / before:.0%} of what it was at the "
            f"start ({before:.3g}; bound {self.entropy_share:.0%}), though the mean reward is "
            f"{reward:.3g} and rollouts have had up to {high:.3g}: the policy hardly explores any "
            "more. Add an entropy bonus (model.entropy) or a KL penalty (model.kl), or lower the "
            "learning rate"
        )

    def _gap(self) -> str | None:
        if not self.gaps.full:
            return None
        now = self.gaps.both[1].mean
        if not now > self.gap:
            return None
        return (
            f"the logprobs of engine and trainer are {now:.3g} nats apart per token (bound "
            f"{self.gap:g}): the rollouts come from a different policy by now. Sync more often, "
            "lower max_staleness or the learning rate, or set model.correction, e.g. TokenTIS"
        )
