"""The probe compares the logprobs of engine and trainer on a few real tokens.

If both compute in float32, no token may differ by more than rounding. In 16-bit formats a single
token proves nothing: with equal weights one in thousands is off by half a nat. So a large gap
there only triggers a second probe, of more tokens, which is judged by its means.
``benchmarks/probe.py`` simulates how often that raises a false alarm.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rl.agents.base import SingleTurn, new_rollouts
from lightning_rl.data.batch import token_rows
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines.base import Engine, drives_engine, logprob_tolerance
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import NonFiniteWeightsError, StaleWeightsError
from lightning_rl.models.model_checks import ADVICE
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.loop.background import run_async
from lightning_rl.run.processes.dist import any_rank, every_rank, from_rank_zero

_log = logging.getLogger(__name__)

AGAIN_TOKENS = 16
"""Tokens per prompt in a second probe; if the engine has less room, it writes several completions.
"""
OUTLIER = 4.0
"""Upper limit of a single token's contribution to a mean, in multiples of ``max_gap``."""
ONE_PROMPT = 2.0
"""Largest allowed mean over the tokens of one prompt, in multiples of ``max_gap``; one replica
wrote them.
"""


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference of logprobs, the token it occurs at, and the mean over all tokens.

    ``by_prompt`` has the differences of each prompt's tokens.
    """

    value: float
    token: str
    trainer: float
    engine: float
    mean: float
    by_prompt: tuple[Tensor, ...]

    def means(self, outlier: float) -> tuple[float, float]:
        """Return the mean over all tokens, and that of the worst prompt; tokens are capped at
        ``outlier``.

        A prompt with fewer than ``AGAIN_TOKENS`` tokens counts as having that many, the missing
        ones without a gap; otherwise a single outlier could dominate its mean.
        """
        counted = [gaps.clamp(max=outlier) for gaps in self.by_prompt]
        worst = max(float(gaps.sum()) / max(len(gaps), AGAIN_TOKENS) for gaps in counted)
        return float(torch.cat(counted).mean()), worst


@torch.no_grad()
def probe_gap(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Prompt],
    temperature: float,
    tokens: int = 2,
    samples: int = 1,
    number: int = 0,
) -> Gap:
    """Let the engine generate ``tokens`` tokens per prompt, score them with the policy, and
    compare.

    Generating, rather than asking for prompt logprobs, uses the prefix cache, so that a stale cache
    is detected too. On several ranks call it on all of them.

    Args:
        engine: the engine to probe.
        policy: the trainer's policy.
        prompts: prompts to continue.
        temperature: the sampling temperature.
        tokens: tokens per completion.
        samples: completions per prompt.
        number: number of the probe; each has its own seeds.
    """
    sampling = Sampling(max_tokens=tokens, temperature=temperature)
    rollouts = new_rollouts(prompts, samples, sampling, seed=0, iteration=-2 - number)
    agent = SingleTurn()

    async def run() -> None:
        await asyncio.gather(*(agent.run(rollout, engine, sampling) for rollout in rollouts))

    with every_rank():
        if drives_engine(engine):
            run_async(run())
    if engine.serves_all_ranks:
        rollouts = from_rank_zero(rollouts)
    return _gap(policy, rollouts)


def probe_again(
    engine: Engine, policy: Policy, prompts: Sequence[Prompt], temperature: float
) -> Gap:
    """Compare on ``AGAIN_TOKENS`` other tokens per prompt; on all ranks, as :func:`probe_gap`.

    The prompts are the same, because the engine's cache may be valid for other prompts.
    """
    room = 1
    with every_rank():
        if drives_engine(engine):
            longest = max(len(prompt.token_ids) for prompt in prompts)
            room = max(1, min(AGAIN_TOKENS, engine.max_length - longest))
    samples = -(-AGAIN_TOKENS // room)
    return probe_gap(engine, policy, prompts, temperature, room, samples, number=1)


def _gap(policy: Policy, rollouts: Sequence[Rollout]) -> Gap:
    batch = pack_rollouts(rollouts).to(next(policy.parameters()).device)
    scores = policy(batch)
    tokens_M = batch["tokens"][scores.live]
    gaps_M = (scores.logprobs - tokens_M["rollout_logprobs"]).abs().nan_to_num(torch.inf)
    group_M = batch["rollouts", "group"][token_rows(batch)[scores.live]]
    worst = int(gaps_M.argmax())
    return Gap(
        value=float(gaps_M[worst]),
        token=policy.tokenizer.decode([int(tokens_M["input_ids"][worst])]),
        trainer=float(scores.logprobs[worst]),
        engine=float(tokens_M["rollout_logprobs"][worst]),
        mean=float(gaps_M.mean()),
        by_prompt=tuple(gaps_M[group_M == group].cpu() for group in group_M.unique()),
    )


def require_agreement(
    gap: Gap,
    again: Callable[[], Gap],
    version: int,
    max_gap: float | None,
    engine_dtype: str,
    trainer_dtype: str,
) -> None:
    """Raise unless engine and trainer agree; on several ranks call it on all of them.

    With float32 on both sides no token may differ by more than ``max_gap``. Otherwise such a token
    triggers a second probe, ``again``, which fails if the mean of all tokens is above ``max_gap``,
    or the mean of one prompt's tokens above twice that. If ``max_gap`` is None, the dtypes
    determine it.

    Raises:
        NonFiniteWeightsError: if the trainer's own logprobs are NaN or infinite.
        StaleWeightsError: naming what was compared, the gap, its bound and the token.
    """
    if any_rank(not math.isfinite(gap.trainer)):
        raise NonFiniteWeightsError(
            f"with the weights of version {version} the trainer's own logprobs are NaN or infinite "
            f"({gap.trainer} on token {gap.token!r}): the run has diverged; {ADVICE}"
        )
    bound = max_gap or logprob_tolerance(engine_dtype, trainer_dtype)
    if not any_rank(gap.value > bound):
        return
    if {engine_dtype, trainer_dtype} == {"float32"}:
        found = f"{gap.value:.3g} nats" if gap.value > bound else None
    else:
        first, gap = gap, again()
        found = _wrong_means(gap, bound)
        _log.info(
            "after the sync of version %d, token %r was %.3g nats off; a second probe found %.3g "
            "on average",
            version,
            first.token,
            first.value,
            gap.mean,
        )
    with every_rank():
        if found is not None:
            raise StaleWeightsError(
                f"after the sync of version {version}, engine and trainer disagree by {found}; "
                f"most on token {gap.token!r} (trainer {gap.trainer:.4f} in {trainer_dtype}, "
                f"engine {gap.engine:.4f} in {engine_dtype}; max_gap={bound:g}): the engine holds "
                "other weights, or a stale cache. Raise max_gap only if the two compute in "
                "different precisions; engine.dtype: null follows the trainer"
            )


def _wrong_means(gap: Gap, bound: float) -> str | None:
    """Describe the mean that is too large in a second probe; None if all are fine."""
    everywhere, worst = gap.means(OUTLIER * bound)
    count = sum(map(len, gap.by_prompt))
    if everywhere > bound:
        return f"{everywhere:.3g} nats on average over {count} tokens"
    if worst > ONE_PROMPT * bound:
        return f"{worst:.3g} nats on average over one prompt's tokens"
    return None
