"""The probe: do engine and trainer agree on a few real tokens?

Where both compute in float32 no token may differ by more than rounding. In 16-bit formats a single
token proves nothing: with the same weights one in thousands is off by half a nat. So a large gap
there only asks for a second probe, of more tokens, that is judged by its means.
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
from lightning_rl.models.policy import Policy
from lightning_rl.models.soundness import ADVICE
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.dist import any_rank, every_rank, from_rank_zero
from lightning_rl.run.loop import run_async

_log = logging.getLogger(__name__)

AGAIN_TOKENS = 16
"""Of each prompt in a second probe; as far as the engine has room, else several completions."""
OUTLIER = 4.0
"""Times ``max_gap``: what one token counts at most in a mean, however far it is off."""
ONE_PROMPT = 2.0
"""Times ``max_gap``: largest mean of a single prompt's tokens, which one replica has written."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Largest difference of logprobs, the token where it is, and the mean of all.

    ``by_prompt`` are the differences of each prompt's tokens.
    """

    value: float
    token: str
    trainer: float
    engine: float
    mean: float
    by_prompt: tuple[Tensor, ...]

    def means(self, outlier: float) -> tuple[float, float]:
        """Of all tokens, and of the worst prompt's; a token counts ``outlier`` at most.

        A prompt with fewer than ``AGAIN_TOKENS`` tokens has that many, the others without a gap:
        else one outlier could be all of its mean.
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
    """Let the engine write ``tokens`` tokens per prompt, score them with the policy, and compare.

    Generating (rather than asking for prompt logprobs) goes through the prefix cache, so that a
    stale one shows up too. On several ranks call it on all of them. ``samples`` are completions of
    each prompt; probes of another ``number`` have other seeds.
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

    The prompts are the same: what an engine has cached of others may be sound.
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

    With float32 on both sides no token may differ by more than ``max_gap``. Otherwise one that does
    makes for a second probe, ``again``, and that fails if the mean of all tokens is above
    ``max_gap``, or the mean of one prompt's above twice that. ``max_gap`` None: what the dtypes
    allow.

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
                "other weights, or a stale cache. Set max_gap higher only if both compute in "
                "different precision; engine.dtype: null follows the trainer"
            )


def _wrong_means(gap: Gap, bound: float) -> str | None:
    """What is wrong with a second probe; None: nothing."""
    everywhere, worst = gap.means(OUTLIER * bound)
    count = sum(map(len, gap.by_prompt))
    if everywhere > bound:
        return f"{everywhere:.3g} nats on average over {count} tokens"
    if worst > ONE_PROMPT * bound:
        return f"{worst:.3g} nats on average over one prompt's tokens"
    return None
