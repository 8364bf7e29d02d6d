"""The guards that come with the library: a rule each, with what it measures and its bound.

Those before the update ask whether the batch is on-policy enough, and can teach anything; those
after it look at what the iteration recorded, or at how completions changed since the first ones.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.callbacks.guards import BatchGuard, IterationGuard, MetricGuard, rule
from lightning_rl.callbacks.samples import FirstAndLast
from lightning_rl.data.batch import token_rows
from lightning_rl.errors import require_at_least
from lightning_rl.learn.base import RecordingModule
from lightning_rl.learn.skipped import has_zero_advantage
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout
from lightning_rl.run.processes.dist import all_max, all_sum

# ---------------------------------------------------------------- the batch, before its update


@rule
class LogprobGapGuard(BatchGuard):
    """The mean distance of the engine's logprobs from the trainer's, in nats per token.

    ``Mask`` removes the rollouts whose own mean exceeds the bound.
    """

    name = "logprob_gap"
    what = "the mean logprob gap between engine and trainer (nats)"
    fix = "sync more often, or let the engine compute in the trainer's precision"
    bound: float = 0.05

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        return mean_of(sampled_gaps(module, batch).abs())

    def offenders(self, module: PolicyModule, batch: TensorDict) -> Tensor:
        row, trained = token_rows(batch), module.skipped.trained_tokens(batch)
        gap = log_weights(module, batch).abs() * trained
        zeros = gap.new_zeros(len(batch["rollouts"]))
        count = zeros.index_add(0, row, trained.to(gap.dtype)).clamp(min=1)
        mean_R = zeros.index_add(0, row, torch.where(trained, gap, 0.0)) / count
        return ~(mean_R <= self.bound)[row]


@rule
class LogprobSpikeGuard(BatchGuard):
    """The largest distance of any token's logprobs, in nats. ``Mask`` removes tokens that exceed
    it.
    """

    name = "logprob_spike"
    what = "the largest logprob gap between engine and trainer (nats)"
    fix = LogprobGapGuard.fix
    bound: float = 2.0

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        return largest_of(sampled_gaps(module, batch).abs())

    def offenders(self, module: PolicyModule, batch: TensorDict) -> Tensor:
        return ~(log_weights(module, batch).abs() <= self.bound)


@rule
class EffectiveSampleGuard(BatchGuard):
    """Effective sample size divided by the number of tokens, (sum w)^2 / (M sum w^2), in (0, 1].

    w = p_trainer / p_engine per token; the value is 1 if both agree. The bound is a lower one.
    """

    name = "effective_sample"
    what = "the effective share of the sample"
    fix = "the rollouts come from another policy; sync more often, or set a correction"
    floor = True
    bound: float = 0.5

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        # Bounded so that one absurd weight leaves a number; it is near 0 then.
        w = sampled_gaps(module, batch).clamp(max=30.0).double().exp()
        sums = torch.stack([w.sum(), (w**2).sum(), torch.ones_like(w).sum()])
        total, squares, count = all_sum(sums).tolist()
        return total**2 / (count * squares or 1.0) if count else None


@rule
class StalenessGuard(BatchGuard):
    """The number of versions that the oldest token lags behind. ``Mask`` removes older tokens."""

    name = "staleness"
    what = "the staleness of the oldest token (versions)"
    fix = "sync more often, or lower the collector's max_staleness"
    bound: float = 4

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        ages = module.iteration - batch["tokens", "versions"]
        return largest_of(ages[module.skipped.trained_tokens(batch)].double())

    def offenders(self, module: PolicyModule, batch: TensorDict) -> Tensor:
        return module.iteration - batch["tokens", "versions"] > self.bound


@rule
class ZeroAdvantageGuard(BatchGuard):
    """The share of rollouts with zero advantage, which teach nothing."""

    name = "zero_advantage"
    what = "the share of rollouts without an advantage"
    fix = "the prompts are too easy, too hard, or too few; filter them, or raise group_size"
    bound: float = 0.95
    patience: int = 3

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        return mean_of(has_zero_advantage(batch))


def sampled_gaps(module: PolicyModule, batch: TensorDict) -> Tensor:
    """Return log p_trainer - log p_engine of the tokens that are trained on."""
    return log_weights(module, batch)[module.skipped.trained_tokens(batch)]


def log_weights(module: PolicyModule, batch: TensorDict) -> Tensor:
    """Return log p_trainer - log p_engine, shape (T,); only valid at ``trained_tokens``."""
    return module.learner.trainer_logprobs(batch) - batch["tokens", "rollout_logprobs"]


def mean_of(values: Tensor) -> float | None:
    """Return the mean of all ranks' values, None if no rank has one."""
    values = values.double()
    total, count = all_sum(torch.stack([values.sum(), torch.ones_like(values).sum()])).tolist()
    return total / count if count else None


def largest_of(values: Tensor) -> float | None:
    """Return the largest value of all ranks, nan if any is nan, None if no rank has one."""
    peak = values.max() if values.numel() else values.new_tensor(-math.inf)
    found = float(all_max(peak))
    return None if found == -math.inf else found


# ---------------------------------------------------------------- what an iteration recorded


@rule
class KLGuard(MetricGuard):
    """The mean divergence per token, in nats, of the updated policy from the one before it.

    Args:
        metric: ``policy/kl_ref`` for the divergence from the reference (needs ``model.kl``).
    """

    fix = "lower lr or ppo_epochs, or add a KL penalty"
    bound: float = 0.1
    metric: str = "policy/kl_old"


@rule
class EntropyGuard(MetricGuard):
    """The mean entropy per token, in nats: near zero, the policy no longer explores."""

    metric = "policy/entropy"
    fix = "lower lr, or add an entropy bonus or a KL penalty"
    floor = True
    bound: float = 0.01
    patience: int = 3


@rule
class NonFiniteGuard(MetricGuard):
    """The number of optimizer steps skipped for a NaN or infinite gradient.

    ``PolicyModule`` skips them itself. The guard adds an action: an alarm in every iteration with
    such a step, or the end of the run.
    """

    name, metric = "non_finite", "policy/nonfinite_skipped"
    what = "the number of optimizer steps skipped for a gradient that is NaN or infinite"
    fix = "look for extreme logprobs or advantages; lower lr"
    bound: float = 0


@rule
class DeadExpertGuard(MetricGuard):
    """The share of experts, over all layers, that got no token of an update.

    Small batches miss some experts by chance.
    """

    name, metric = "dead_experts", "experts/dead_share"
    what = "the share of experts without a token"
    fix = "raise model.balance, lower lr, or let more tokens count: groups_per_iteration"
    bound: float = 0.1
    patience: int = 3


@rule
class ExpertOverloadGuard(MetricGuard):
    """The load of the busiest expert of any layer, in multiples of an even share.

    Its maximum is the number of experts divided by the number of experts per token.
    """

    name, metric = "expert_overload", "experts/overload"
    what = "the busiest expert's multiple of an even share"
    fix = "raise model.balance, or lower lr"
    bound: float = 4.0
    patience: int = 3


# ---------------------------------------------------------------- how completions changed


@rule
class ChangeGuard(IterationGuard, ABC):
    """A guard of how completions changed since the first iterations.

    What is typical of reward hacking may also be what the task asks for, so these guards are never
    added automatically.

    Args:
        window: iterations that are averaged at either end.
    """

    language_only = True
    reruns = False  # recorded rollouts are not compared
    state_names = ("in_a_row", "values")
    window: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, window=self.window)
        self.values = FirstAndLast(self.window)

    @abstractmethod
    def number(self, module: RecordingModule, graded: Sequence[Rollout]) -> float:
        """Return an iteration's number."""

    @abstractmethod
    def change(self, before: float, now: float) -> float:
        """Return what the bound limits, and set ``what``; of the means at either end."""

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        module, datamodule = self.rollout_module_of(pl_module), self.rl_data_of(trainer)
        if trainer.world_size > 1:  # all ranks judge by the same
            rollouts = datamodule.generated
        if graded := [rollout for rollout in rollouts if rollout.graded]:
            self.values.add([self.number(module, graded)])

    def measure(self, module: RecordingModule) -> float | None:
        before, now = self.values.both
        return self.change(before.mean, now.mean) if self.values.full else None


@rule
class LengthGuard(ChangeGuard):
    """The factor by which completions became longer, or shorter."""

    name = "length"
    bound: float = 2.0

    def number(self, module: RecordingModule, graded: Sequence[Rollout]) -> float:
        return sum(rollout.length for rollout in graded) / len(graded)

    def change(self, before: float, now: float) -> float:
        self.what = f"the change of completions from {before:.3g} to {now:.3g} tokens, as a factor,"
        return max(now, before) / max(1.0, min(now, before))


@rule
class DuplicatesGuard(ChangeGuard):
    """The rise of the share of completions that another prompt got too.

    It records that share as ``rollout/duplicates_across``, and as ``rollout/duplicates_within`` the
    share that another rollout of the group repeats, which rises as the policy gets certain.
    """

    name = "duplicates"
    bound: float = 0.3

    def number(self, module: RecordingModule, graded: Sequence[Rollout]) -> float:
        within, across = duplicate_shares(graded)
        module.record({"rollout/duplicates_within": within, "rollout/duplicates_across": across})
        return across

    def change(self, before: float, now: float) -> float:
        self.what = f"the rise of completions that prompts share, from {before:.0%} to {now:.0%},"
        return now - before


def duplicate_shares(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return the shares of rollouts whose tokens another rollout of the group has, and another
    prompt's.
    """
    in_group = Counter((r.group_id, *r.token_ids) for r in rollouts)
    prompts: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for rollout in rollouts:
        prompts[tuple(rollout.token_ids)].add(rollout.prompt.key)
    within = sum(in_group[(r.group_id, *r.token_ids)] > 1 for r in rollouts)
    across = sum(len(prompts[tuple(r.token_ids)]) > 1 for r in rollouts)
    return within / len(rollouts), across / len(rollouts)
