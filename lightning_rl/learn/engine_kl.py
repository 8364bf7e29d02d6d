"""The KL divergence between the weights that an engine has and those of a learner."""

import math

import torch
from tensordict import TensorDict

from lightning_rl.algos.kl import k3, ratios
from lightning_rl.learn.learner import Learner
from lightning_rl.run.processes.dist import all_sum


def kl_from_engine(learner: Learner, batch: TensorDict, version: int) -> float:
    """Return the KL, in nats per token, from the weights of ``version`` to the learner's.

    It is the mean of k3, which is never negative, over the tokens that an engine wrote with that
    version, and takes one forward pass. After :func:`note_engine`, it is over the tokens of other
    versions, too, each weighted by how much likelier the version makes it than its writer did. nan
    if there are no such tokens. Call it on all ranks; all get the same value.
    """
    tokens = batch["tokens"]
    noted = "engine_logprobs" in tokens
    written = tokens["loss_mask"] & (noted | (tokens["versions"] == version))
    if not all_sum(written.sum()):
        return math.nan
    learner.policy.score(batch, "present_logprobs", learner.max_tokens_per_micro_batch)
    now, rollout = (tokens[n][written].double() for n in ("present_logprobs", "rollout_logprobs"))
    then = tokens["engine_logprobs"][written].double() if noted else rollout
    weights = ratios(then - rollout)
    total, count = all_sum(torch.stack([(weights * k3(then, now)).sum(), weights.sum()]))
    return float(total / count)


def note_engine(learner: Learner, batch: TensorDict) -> None:
    """Add ``engine_logprobs`` (T,), those of the present weights, which the engine has, too."""
    learner.policy.score(batch, "engine_logprobs", learner.max_tokens_per_micro_batch)
