"""Parts of the runs that are packed, with a fault each: engine, reward, callback and loss."""

import math
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.algos.losses import Metrics, PolicyLoss
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.engines.hf.decoding import Decoder
from lightning_rl.engines.hf.requests import DecodeRequest
from tests.support.lots import LotEngine, draw_by_lot

PLANTED = "10="
"""The prompt with whose rollouts something goes wrong."""
_READ = [4, 3, 2]
"""Its tokens."""
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


class NaNEngine(LotEngine):
    """Answers the planted prompt with NaN as the logprob of the third token, if that is odd."""

    def _decoder(self, lm: PreTrainedModel) -> Decoder:
        decoder = super()._decoder(lm)
        decoder.draw = _with_nan  # type: ignore[method-assign]
        return decoder


def _with_nan(logits: Tensor, rows: Sequence[DecodeRequest]) -> tuple[list[int], list[float]]:
    tokens, logprobs = draw_by_lot(logits, rows)
    for place, row in enumerate(rows):
        if row.prompt == _READ and len(row.tokens) == 2 and tokens[place] % 2:
            logprobs[place] = math.nan
    return tokens, logprobs


class Damage(RLCallback):
    """Makes the product of a layer's queries and keys overflow from the second iteration on."""

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
