"""The probe: do engine and trainer agree on a few real tokens?"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_rl.agents.base import SingleTurn
from lightning_rl.collect.loop import run_async
from lightning_rl.collect.ranks import feeds
from lightning_rl.collect.source import new_rollouts
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.dist import every_rank, from_rank_zero
from lightning_rl.engines.base import Engine, Sampling, logprob_tolerance
from lightning_rl.errors import StaleWeightsError
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt


@dataclass(frozen=True, slots=True)
class Gap:
    """Largest difference of logprobs, and the token where it is."""

    value: float
    token: str
    trainer: float
    engine: float


@torch.no_grad()
def probe_gap(
    engine: Engine, policy: Policy, prompts: Sequence[Prompt], temperature: float, tokens: int = 2
) -> Gap:
    """Let the engine write ``tokens`` tokens per prompt, score them with the policy, and compare.

    Generating (rather than asking for prompt logprobs) goes through the prefix cache, so that a
    stale one shows up too. On several ranks call it on all of them.
    """
    sampling = Sampling(max_tokens=tokens, temperature=temperature)
    rollouts = new_rollouts(prompts, 1, sampling, seed=0, iteration=-2)
    agent = SingleTurn()

    async def run() -> None:
        await asyncio.gather(*(agent.run(rollout, engine, sampling) for rollout in rollouts))

    with every_rank():
        if feeds(engine):
            run_async(run())
    if engine.serves_all_ranks:
        rollouts = from_rank_zero(rollouts)
    device = next(policy.parameters()).device
    batch = pack_rollouts(rollouts).to(device)
    scores = policy(batch)
    tokens_M = batch["tokens"][scores.live]
    gaps = (scores.logprobs - tokens_M["rollout_logprobs"]).abs().nan_to_num(torch.inf)
    worst = int(gaps.argmax())
    return Gap(
        value=float(gaps[worst]),
        token=policy.tokenizer.decode([int(tokens_M["input_ids"][worst])]),
        trainer=float(scores.logprobs[worst]),
        engine=float(tokens_M["rollout_logprobs"][worst]),
    )


def require_agreement(
    gap: Gap, version: int, max_gap: float | None, engine_dtype: str, trainer_dtype: str
) -> None:
    """Raise unless the gap is within its bound; None: what the dtypes allow.

    Raises:
        StaleWeightsError: naming the gap, its bound and the token.
    """
    bound = max_gap or logprob_tolerance(engine_dtype, trainer_dtype)
    if gap.value > bound:
        raise StaleWeightsError(
            f"after the sync of version {version}, engine and trainer disagree by {gap.value:.3g} "
            f"nats on token {gap.token!r} (trainer {gap.trainer:.4f} in {trainer_dtype}, engine "
            f"{gap.engine:.4f} in {engine_dtype}; max_gap={bound:g}): the engine holds other "
            "weights, or a stale cache. Set max_gap higher only if both compute in different "
            "precision; engine.dtype: null follows the trainer"
        )
