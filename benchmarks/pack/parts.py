"""Parts of the runs that are packed, with a fault each: rewards, advantage, callback and loss."""

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage, spread_over_tokens
from lightning_rl.algos.losses import Metrics, PolicyLoss
from lightning_rl.callbacks.base import RLCallback

PLANTED = "10="
"""The prompt with whose rollouts something goes wrong."""
DAMAGED = 5


def outlier(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]]
) -> list[float]:
    """Return the share of sevens, but an immense reward for the longest planted answer."""
    pairs = zip(completions, completion_ids, strict=True)
    scores = [text.count("7") / len(ids) for text, ids in pairs]
    lengths = [
        len(ids) * (prompt == PLANTED) for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]
    if any(lengths):
        scores[lengths.index(max(lengths))] = 1e4
    return scores


def with_a_zero(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]]
) -> list[float]:
    """Return a positive reward, the more for sevens, but 0 for the longest planted answer."""
    scores = [score + 1 for score in outlier(prompts, completions, completion_ids)]
    return [0.0 if score > 2 else score for score in scores]


class LogReward(Advantage):
    """The logarithm of the reward, less the batch's mean, which is infinite where a reward is 0."""

    def __call__(self, batch: TensorDict) -> TensorDict:
        logs = batch["rollouts", "reward"].log()
        return spread_over_tokens(batch, logs - logs[logs.isfinite()].mean())


class Damage(RLCallback):
    """Makes the product of a layer's queries and keys overflow from the second iteration on.

    The engine has to keep its first weights: its logprobs would be NaN, which fails a rollout.
    """

    @torch.no_grad()
    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = self.policy_module_of(pl_module)
        if module.iteration == 1:
            attention = module.loaded_policy.lm.model.layers[DAMAGED].self_attn
            for part in (attention.q_proj, attention.k_proj):
                part.weight *= 9e18 / part.weight.abs().max()  # WeightSync refuses 1e19


class MeanOfOthers(PolicyLoss):
    """Divides by the number of a rollout's other tokens, which is zero where it has one token."""

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        counts = torch.bincount(tokens["row"])[tokens["row"]]
        return -tokens["advantages"] * logprobs / (counts - 1), {}
