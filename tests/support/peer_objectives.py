"""Provide the objectives of TRL 1.16, verl 0.9 and prime-rl, as formulas of their options.

Tensors are padded (B, T), in float64.

Formulas are written anew from what they compute: none is shared with what is tested against it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import token_rows


class Padded:
    """Converts model tokens to (B, T) with a mask."""

    def __init__(self, batch: TensorDict) -> None:
        tokens, row = batch["tokens"], token_rows(batch)
        live = tokens["loss_mask"].nonzero().squeeze(1)
        self.live, self.row = live, row[live]
        counts = torch.bincount(self.row, minlength=len(batch["rollouts"]))
        step = torch.arange(len(live)) - (counts.cumsum(0) - counts)[self.row]
        self.at, self.shape = (self.row, step), (len(counts), int(counts.max()))
        self.mask = self(torch.ones(len(row), dtype=torch.double))

    def __call__(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.shape).index_put(self.at, values[self.live])

    def flat(self, values: Tensor) -> Tensor:
        return values[self.at]


@dataclass
class Leaves:
    """The leaves of autograd: what a policy and its critic answer, (B, T) each."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor

    def rows(self, chosen: slice) -> "Leaves":
        return Leaves(self.logprobs[chosen], self.entropy[chosen], self.values[chosen])


@dataclass
class Sampled:
    """The fixed values: (B, T), but ``rewards`` and ``truncated`` (B,); groups of ``group_size``.

    ``rewards`` are the weighted sums of ``parts`` (B, P), of which some are NaN; ``greedy`` (B,)
    are those of greedy completions.
    """

    mask: Tensor
    old: Tensor
    engine: Tensor
    reference: Tensor
    values: Tensor
    rewards: Tensor
    truncated: Tensor
    parts: Tensor
    weights: Tensor
    greedy: Tensor
    group_size: int

    def rows(self, chosen: slice) -> "Sampled":
        parts = {name: v[chosen] for name, v in vars(self).items() if name != "group_size"}
        return Sampled(**parts, group_size=self.group_size)


def sums(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1, keepdim=True)


def means(x: Tensor, mask: Tensor) -> Tensor:
    return sums(x, mask) / mask.sum(1, keepdim=True).clamp(min=1)


def grouped(x: Tensor, size: int, of: str) -> Tensor:
    """Return the mean, or the unbiased standard deviation, of each value's own group."""
    groups = x.view(-1, size)
    return getattr(groups, of)(1).repeat_interleave(size)


# ---------------------------------------------------------------- TRL


def trl_apart(s: Sampled) -> Tensor:
    """Apply ``normalize_then_sum``: normalise each reward by group, then the batch's sums."""
    apart = torch.zeros_like(s.parts)
    for rows in torch.arange(len(s.parts)).split(s.group_size):
        for k, part in enumerate(s.parts[rows].T):
            known = part[~part.isnan()]
            apart[rows, k] = ((part - known.mean()) / (known.std() + 1e-4)).nan_to_num(0)
    added = (apart * s.weights).sum(1)
    return (added - added.mean()) / (added.std() + 1e-4)


def trl_advantages(o: Mapping[str, Any], s: Sampled) -> Tensor:
    if o["multi_objective_aggregation"] == "normalize_then_sum":
        return trl_apart(s)
    centred = s.rewards - grouped(s.rewards, s.group_size, "mean")
    if o["scale_rewards"] in (False, "none"):
        return centred
    batch = o["scale_rewards"] == "batch"
    spread = s.rewards.std() if batch else grouped(s.rewards, s.group_size, "std")
    return centred / (spread + 1e-4)


def trl_weights(o: Mapping[str, Any], s: Sampled, mask: Tensor) -> Tensor:
    gap = (s.old - s.engine) * mask
    level, _, kind = o["vllm_importance_sampling_mode"].partition("_")
    w = (gap.sum(1, keepdim=True) if level == "sequence" else gap).exp()
    low = o["vllm_importance_sampling_clip_min"]
    high = o["vllm_importance_sampling_cap"] or o["vllm_importance_sampling_clip_max"]
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    return w.clamp(low, high) if kind == "truncate" else w * ((w >= low) & (w <= high))


def trl_objective(o: Mapping[str, Any], s: Sampled, leaves: Leaves) -> Tensor:
    """Return the first optimizer step's loss, by ``gradient_accumulation_steps`` micro-batches."""
    mask = s.mask
    if o["mask_truncated_completions"]:
        mask = mask * ~s.truncated[:, None]
    advantages = trl_advantages(o, s)
    size, accumulated = o["per_device_train_batch_size"], o["gradient_accumulation_steps"]
    parts = o["steps_per_generation"] or accumulated
    tokens_of_a_step = mask.sum() * accumulated / parts
    total = torch.zeros((), dtype=torch.double)
    for at in range(0, size * accumulated, size):
        rows = slice(at, at + size)
        total = total + trl_micro_batch(
            o, s.rows(rows), leaves.rows(rows), mask[rows], advantages[rows], tokens_of_a_step
        )
    return total


def trl_micro_batch(o, s, leaves, mask, advantages, tokens_of_a_step) -> Tensor:
    kind, share = o["loss_type"], 1 / o["gradient_accumulation_steps"]
    log_ratio, A = leaves.logprobs - s.old, advantages[:, None]
    if o["importance_sampling_level"] == "sequence":
        log_ratio = means(log_ratio, mask)
    w = log_ratio.exp()
    low, high = o["epsilon"], o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    if kind == "cispo":
        loss = -w.clamp(max=high).detach() * A * leaves.logprobs
    elif kind == "sapo":
        tau = torch.where(A > 0, o["sapo_temperature_pos"], o["sapo_temperature_neg"])
        loss = -A * 4 / tau / (1 + (-tau * (w - 1)).exp())
    elif kind == "vespo":
        product = sums((leaves.logprobs - s.old).detach().clamp(-20, 20), mask)
        if o["use_vllm"] and o["vllm_importance_sampling_correction"]:
            product = product + sums(trl_weights(o, s, mask).log().clamp(-18.42, 20), mask)
        gains = A >= 0
        k = torch.where(gains, o["vespo_k_pos"], o["vespo_k_neg"])
        rate = torch.where(gains, o["vespo_lambda_pos"], o["vespo_lambda_neg"])
        product = product.clamp(-18.42, 20)
        loss = -(rate + k * product - rate * product.exp()).exp() * A * leaves.logprobs
    else:
        bounded = w if o["delta"] is None else w.clamp(max=o["delta"])
        loss = -torch.min(bounded * A, w.clamp(1 - low, 1 + high) * A)
    if o["off_policy_mask_threshold"] is not None:
        sampled = s.engine if o["use_vllm"] else s.old
        gap = means(sampled - leaves.logprobs.detach(), mask)
        loss = loss * ((A >= 0) | (gap <= o["off_policy_mask_threshold"]))
    if o["use_vllm"] and o["vllm_importance_sampling_correction"] and kind != "vespo":
        loss = loss * trl_weights(o, s, mask)
    if o["beta"]:
        d = s.reference - leaves.logprobs
        k3 = d.exp() - d - 1
        loss = loss + o["beta"] * (k3 * w if o["use_bias_correction_kl"] else k3)
    everything = (loss * mask).sum()
    if kind in ("grpo", "sapo"):
        result = means(loss * torch.ones_like(mask), mask).mean() * share
    elif kind == "bnpo":
        result = everything / mask.sum().clamp(min=1) * share
    elif kind == "dr_grpo":
        result = everything / (len(mask) * o["max_completion_length"]) * share
    elif kind == "luspo":
        result = everything / len(mask) * share
    else:
        result = everything / tokens_of_a_step
    entropy = (leaves.entropy * mask).sum() / mask.sum().clamp(min=1) * share
    return result - o["entropy_coef"] * entropy


# ---------------------------------------------------------------- verl

ACTOR, ALGORITHM = "actor_rollout_ref.actor.", "algorithm."
CORRECTION = "algorithm.rollout_correction."


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    live = x[mask > 0]
    return (x - live.mean()) / (live.var() + 1e-8).sqrt()


def two(threshold: Any) -> tuple[float | None, float]:
    low, _, high = str(threshold).rpartition("_")
    return float(low) if low else None, float(high)


def verl_penalty(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    d = logprobs - reference
    k2 = d**2 / 2
    name = kind.removesuffix("+")
    if name in ("kl", "k1"):
        found = d
    elif name in ("mse", "k2"):
        found = k2
    elif name == "abs":
        found = d.abs()
    else:
        away = (-d).clamp(-20, 20)
        found = (away.exp() - away - 1).clamp(-10, 10)
    return k2 - k2.detach() + found.detach() if kind.endswith("+") else found


def verl_rejected(o: Mapping[str, Any], log_w: Tensor, mask: Tensor) -> Tensor:
    """Reject from the mask: bounds are on k1, log p_engine - log p_old."""
    kind = o[CORRECTION + "rollout_rs"]
    if kind is None:
        return mask
    low, high = two(o[CORRECTION + "rollout_rs_threshold"])
    low = 1 / high if low is None else low
    k1 = -log_w.clamp(-20, 20)
    if kind.startswith("seq"):
        k1 = (sums if "sum" in kind else means)(k1, mask).expand_as(mask)
    inside = (k1 >= torch.tensor(low).log()) & (k1 <= torch.tensor(high).log())
    return mask * inside


def verl_weights(o: Mapping[str, Any], log_w: Tensor, mask: Tensor) -> Tensor:
    kind, threshold = o[CORRECTION + "rollout_is"], o[CORRECTION + "rollout_is_threshold"]
    if kind is None or threshold is None:
        return torch.ones_like(mask)
    log_w = sums(log_w, mask).expand_as(mask) if kind == "sequence" else log_w
    w, (low, high) = log_w.clamp(-20, 20).exp(), two(threshold)
    return w.clamp(max=high) if low is None else w * ((w >= low) & (w <= high))


def verl_advantages(
    o: Mapping[str, Any], s: Sampled, rewards: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (B, T) of rewards (B, T)."""
    name, scores = o[ALGORITHM + "adv_estimator"], rewards.sum(1)
    gamma, n = o[ALGORITHM + "gamma"], s.group_size
    if name == "gae":
        return verl_gae(o, s, rewards, mask)
    if name == "reinforce_plus_plus":
        found, carry = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.double)
        for t in reversed(range(rewards.shape[1])):
            now = rewards[:, t] + gamma * carry
            carry = torch.where(mask[:, t] > 0, now, carry)
            found[:, t] = now
        return whitened(found, mask) * mask, found
    if name == "remax":
        to_go = (rewards * mask).flip(1).cumsum(1).flip(1)
        return to_go - s.greedy[:, None] * mask, rewards
    mean = grouped(scores, n, "mean") if n > 1 else torch.zeros_like(scores)
    if name == "reinforce_plus_plus_baseline":
        return whitened((scores - mean)[:, None].expand_as(mask), mask) * mask, rewards
    if name.startswith("rloo"):
        found = (scores - mean) * n / (n - 1) if n > 1 else scores * (name == "rloo")
    else:
        spread = grouped(scores, n, "std") if n > 1 else torch.ones_like(scores)
        by_std = o[ALGORITHM + "norm_adv_by_std_in_grpo"]
        found = (scores - mean) / ((spread + 1e-6) if by_std else 1.0)
    return found[:, None] * mask, rewards


def verl_gae(o, s, rewards, mask) -> tuple[Tensor, Tensor]:
    gamma, lam = o[ALGORITHM + "gamma"], o[ALGORITHM + "lam"]
    following = carry = torch.zeros(len(rewards), dtype=torch.double)
    found = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        now = rewards[:, t] + gamma * following - s.values[:, t] + gamma * lam * carry
        following = torch.where(mask[:, t] > 0, s.values[:, t], following)
        carry = torch.where(mask[:, t] > 0, now, carry)
        found[:, t] = carry
    return whitened(found, mask) * mask, found + s.values


def verl_average(mode: str, loss: Tensor, mask: Tensor, factor: float) -> Tensor:
    rows = (loss * mask).sum(1)
    found = {
        "token-mean": rows.sum() / mask.sum(),
        "token-sum": rows.sum(),
        "seq-mean-token-sum": rows.sum() / len(mask),
        "seq-mean-token-sum-norm": rows.sum() / len(mask) / factor,
        "seq-mean-token-mean": (rows / (mask.sum(1) + 1e-8)).sum() / len(mask),
    }
    return found[mode]


def verl_policy_loss(o, mode: str, logprobs: Tensor, old: Tensor, A: Tensor, mask: Tensor):
    low, high = (
        o[ACTOR + "clip_ratio"] if bound is None else bound
        for bound in (o[ACTOR + "clip_ratio_low"], o[ACTOR + "clip_ratio_high"])
    )
    w = (logprobs - old).clamp(-20, 20).exp()
    if mode == "gpg":
        return -A * logprobs
    if mode == "cispo":
        return -w.clamp(1 - low, 1 + high).detach() * A * logprobs
    if mode == "sapo":
        tau = torch.where(A > 0, o[ACTOR + "tau_pos"], o[ACTOR + "tau_neg"])
        return -A * 4 / tau / (1 + (-tau * (w - 1)).exp())
    if mode == "geo_mean":
        c, sign = logprobs - old, A.sign()
        c = sign * torch.min(sign * c, sign * c.clamp(-low, high))
        return (-means(A, mask) * means(c, mask).exp()).expand_as(A)
    if mode == "gspo":
        s = means(logprobs - old, mask).detach()
        w = (s + logprobs - logprobs.detach()).clamp(max=10).exp()
        return torch.max(-A * w, -A * w.clamp(1 - low, 1 + high))
    loss = torch.max(-A * w, -A * w.clamp(1 - low, 1 + high))
    return torch.where(A < 0, torch.min(loss, -A * o[ACTOR + "clip_ratio_c"]), loss)


def verl_objective(o: Mapping[str, Any], s: Sampled, leaves: Leaves) -> Tensor:
    """Return the actor's loss, and the critic's where there is one, of a one-minibatch batch."""
    bypass = o[CORRECTION + "bypass_mode"]
    old, mask, rewards = s.engine if bypass else s.old, s.mask, torch.zeros_like(s.mask)
    # The reward stands on a sequence's last token.
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    rewards[torch.arange(len(last)), last] = s.rewards
    if o[ALGORITHM + "use_kl_in_reward"]:
        kl = verl_penalty(o[ALGORITHM + "kl_penalty"], old, s.reference) * mask
        rewards = rewards - o[ALGORITHM + "kl_ctrl.kl_coef"] * kl
    weights = torch.ones_like(mask)
    if not bypass:
        weights = verl_weights(o, s.old - s.engine, mask)
        mask = verl_rejected(o, s.old - s.engine, mask)
    A, returns = verl_advantages(o, s, rewards, mask)
    mode, average = o[ACTOR + "policy_loss.loss_mode"], o[ACTOR + "loss_agg_mode"]
    factor = o[ACTOR + "loss_scale_factor"] or o["data.max_response_length"]
    kept, by_sequence = mask, mode in ("gspo", "sapo", "geo_mean") and not bypass
    if bypass:
        log_w = (leaves.logprobs - s.engine).detach()
        reinforce = o[CORRECTION + "loss_type"] == "reinforce"
        mode = "gpg" if reinforce else "vanilla"
        weights = verl_weights(o, log_w, mask) if reinforce else weights
        kept = verl_rejected(o, log_w, mask)
    if mode == "geo_mean":
        weights = means((weights + 1e-10).log(), mask).exp()
    loss = weights * verl_policy_loss(o, mode, leaves.logprobs, old, A, mask)
    of_loss = "seq-mean-token-mean" if by_sequence else average
    total = verl_average(of_loss, loss, kept, factor)
    total = total - o[ACTOR + "entropy_coeff"] * verl_average(average, leaves.entropy, mask, factor)
    if o[ACTOR + "use_kl_loss"]:
        kl = verl_penalty(o[ACTOR + "kl_loss_type"], leaves.logprobs, s.reference)
        total = total + o[ACTOR + "kl_loss_coef"] * verl_average(average, kl, mask, factor)
    if o[ALGORITHM + "adv_estimator"] == "gae":
        bound = o["critic.cliprange_value"]
        near = leaves.values.clamp(s.values - bound, s.values + bound)
        error = torch.max((leaves.values - returns) ** 2, (near - returns) ** 2)
        own = o["critic.loss_agg_mode"] if "critic.loss_agg_mode" in o.get("said", ()) else average
        total = total + 0.5 * verl_average(own, error, mask, factor)
    return total


# ---------------------------------------------------------------- prime-rl


def prime_advantages(o: Mapping[str, Any], s: Sampled) -> Tensor:
    mean = grouped(s.rewards, s.group_size, "mean")
    kind = o["orchestrator.algo.type"]
    if kind == "rae":  # an average that starts at 0, moved by one rollout after the other
        found, baseline, decay = [], 0.0, o["orchestrator.algo.decay"]
        for reward in s.rewards.tolist():
            found.append(reward - baseline)
            baseline = decay * baseline + (1 - decay) * reward
        return torch.tensor(found, dtype=torch.double)
    return (s.rewards - mean) / (mean if kind == "max_rl" else 1)


def prime_objective(o: Mapping[str, Any], s: Sampled, leaves: Leaves) -> Tensor:
    """Return the loss of a batch in one step: ratios to the engine, averaged over all tokens."""
    A = prime_advantages(o, s)[:, None].expand_as(s.mask)
    gap = leaves.logprobs - s.engine
    moved = leaves.logprobs.detach().exp() - s.engine.exp()
    high, low = o["trainer.loss.dppo_mask_high"], o["trainer.loss.dppo_mask_low"]
    kept = torch.where(A > 0, moved <= high, moved >= -low)
    gain = o["trainer.loss.adv_tau"] * A * gap.exp() * kept
    loss = o["trainer.loss.kl_tau"] * gap**2 - gain
    return (loss * s.mask).sum() / s.mask.sum()
