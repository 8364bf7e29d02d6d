"""Guards of the batch before its update: is it on-policy enough, and can it teach anything?"""

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.callbacks.guards import BatchGuard
from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import token_rows
from lightning_rl.learn.left_out import has_zero_advantage
from lightning_rl.module import PolicyModule
from lightning_rl.run.processes.dist import all_max, all_sum


@configurable
@dataclass(eq=False, repr=False)
class LogprobGapGuard(BatchGuard):
    """The mean distance of the engine's logprobs from the trainer's, in nats per token.

    ``Mask`` removes the rollouts whose own mean exceeds the bound.
    """

    name = "logprob_gap"
    what = "the mean logprob gap between engine and trainer (nats)"
    fix = "sync more often, or let the engine compute in the trainer's precision"
    bound: float = 0.05

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        gap = log_weights(module, batch)[module.left_out.trained_tokens(batch)].abs().double()
        total, count = all_sum(torch.stack([gap.sum(), torch.ones_like(gap).sum()])).tolist()
        return total / count if count else None

    def offenders(self, module: PolicyModule, batch: TensorDict) -> Tensor:
        row, trained = token_rows(batch), module.left_out.trained_tokens(batch)
        gap = log_weights(module, batch).abs() * trained
        zeros = gap.new_zeros(len(batch["rollouts"]))
        count = zeros.index_add(0, row, trained.to(gap.dtype)).clamp(min=1)
        mean_R = zeros.index_add(0, row, torch.where(trained, gap, 0.0)) / count
        return ~(mean_R <= self.bound)[row]


@configurable
@dataclass(eq=False, repr=False)
class LogprobSpikeGuard(BatchGuard):
    """The largest distance of any token's logprobs, in nats. ``Mask`` removes tokens that exceed
    it.
    """

    name = "logprob_spike"
    what = "the largest logprob gap between engine and trainer (nats)"
    fix = LogprobGapGuard.fix
    bound: float = 2.0

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        gap = log_weights(module, batch)[module.left_out.trained_tokens(batch)].abs()
        return largest_of(gap)

    def offenders(self, module: PolicyModule, batch: TensorDict) -> Tensor:
        return ~(log_weights(module, batch).abs() <= self.bound)


@configurable
@dataclass(eq=False, repr=False)
class EffectiveSampleGuard(BatchGuard):
    """Effective sample size divided by the number of tokens, (sum w)^2 / (M sum w^2), in (0, 1].

    w = p_trainer / p_engine per token; the value is 1 if both agree. The bound is a lower one.
    """

    name = "effective_sample"
    what = "the effective share of the sample"
    fix = "the rollouts come from another policy; sync more often, or set a correction"
    bound: float = 0.5

    def breaks(self, value: float) -> bool:
        return not value >= self.bound

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        # Bounded so that one absurd weight leaves a number; it is near 0 then.
        log_w = log_weights(module, batch)[module.left_out.trained_tokens(batch)].clamp(max=30.0)
        w = log_w.double().exp()
        sums = torch.stack([w.sum(), (w**2).sum(), torch.ones_like(w).sum()])
        total, squares, count = all_sum(sums).tolist()
        if not count:
            return None
        return total**2 / (count * squares) if squares else 0.0


@configurable
@dataclass(eq=False, repr=False)
class StalenessGuard(BatchGuard):
    """The number of versions that the oldest token lags behind. ``Mask`` removes older tokens."""

    name = "staleness"
    what = "the staleness of the oldest token (versions)"
    fix = "sync more often, or lower the collector's max_staleness"
    bound: float = 4

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        ages = module.iteration - batch["tokens", "versions"]
        return largest_of(ages[module.left_out.trained_tokens(batch)].double())

    def offenders(self, module: PolicyModule, batch: TensorDict) -> Tensor:
        return module.iteration - batch["tokens", "versions"] > self.bound


@configurable
@dataclass(eq=False, repr=False)
class ZeroAdvantageGuard(BatchGuard):
    """The share of rollouts with zero advantage, which teach nothing."""

    name = "zero_advantage"
    what = "the share of rollouts without an advantage"
    fix = "the prompts are too easy, too hard, or too few; filter them, or raise group_size"
    bound: float = 0.95
    patience: int = 3

    def measure(self, module: PolicyModule, batch: TensorDict) -> float | None:
        idle = has_zero_advantage(batch).double()
        total, count = all_sum(torch.stack([idle.sum(), torch.ones_like(idle).sum()])).tolist()
        return total / count


def log_weights(module: PolicyModule, batch: TensorDict) -> Tensor:
    """Return log p_trainer - log p_engine, shape (T,); only valid at ``trained_tokens``."""
    return module.learner.trainer_logprobs(batch) - batch["tokens", "rollout_logprobs"]


def largest_of(values: Tensor) -> float | None:
    """Return the largest value of all ranks, nan if any is nan, None if no rank has one."""
    peak = values.max() if values.numel() else values.new_tensor(-math.inf)
    found = float(all_max(peak))
    return None if found == -math.inf else found
