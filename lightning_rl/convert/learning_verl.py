"""The half of verl's configuration that defines the update: loss, advantages, optimizer."""

from typing import Any

from lightning_rl.convert.conversion import Conversion, Given, instance
from lightning_rl.convert.distillation_verl import carry_teacher, teaches_alone
from lightning_rl.convert.rejection_verl import (
    CORRECTION,
    TRUNCATED,
    bounds,
    carry_correction,
)
from lightning_rl.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
ESTIMATORS = {"kl": "K1", "k1": "K1", "mse": "K2", "k2": "K2", "low_var_kl": "K3", "k3": "K3"}
KL_CAP = 10.0
"""verl caps k3 of a token at this value."""
BY_SEQUENCE = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over each sequence, then over sequences, whatever is configured."""


def group_size(given: Given) -> int:
    """Return completions per prompt: Search-R1 repeats a prompt before requesting ``n`` of each."""
    return int(given[ROLLOUT + "n"] * given[ROLLOUT + "n_agent"])


def carry(given: Given, result: Conversion, steps: int, total: int | None) -> None:
    """Carry over what defines the update.

    Args:
        given: the values.
        result: what has been converted.
        steps: optimizer steps of an iteration.
        total: those of the run, if known.
    """
    mode = carry_correction(given, result)
    _loss(given, result, mode or given[ACTOR + "policy_loss.loss_mode"])
    if not teaches_alone(given):
        _advantage(given, result)
    _penalties(given, result)
    carry_teacher(given, result, steps)
    _optimizer(given, result, total)


def _loss(given: Given, result: Conversion, mode: str) -> None:
    """Set loss and aggregation."""
    both = given[ACTOR + "clip_ratio"]
    low, high = given[ACTOR + "clip_ratio_low"], given[ACTOR + "clip_ratio_high"]
    if given.says(ACTOR + "clip_ratio") and low is not None and high is not None:
        result.remarks.append(
            f"{ACTOR}clip_ratio {both:g} has no effect in verl beside clip_ratio_low {low:g} and "
            f"clip_ratio_high {high:g}, which are written"
        )
    clips = {"clip_low": both if low is None else low, "clip_high": both if high is None else high}
    dual = given[ACTOR + "clip_ratio_c"]
    if mode in ("gspo", "cispo"):
        result.put_class("model.loss", mode.upper(), **clips)
    elif mode == "sapo":
        positive, negative = given[ACTOR + "tau_pos"], given[ACTOR + "tau_neg"]
        result.put_class("model.loss", "SAPO", tau_positive=positive, tau_negative=negative)
    elif mode == "geo_mean":
        result.put_class("model.loss", "GMPO", **clips)
        # What verl averages over a sequence is a token's own here.
        if given.look("algorithm.adv_estimator") == "gae":
            result.leave(given, ACTOR + "policy_loss.loss_mode")
        if given.look(CORRECTION + "rollout_is") == "token":
            result.leave(given, CORRECTION + "rollout_is")
    elif mode == "gpg":
        result.put_class("model.loss", "Reinforce")
    elif mode == TRUNCATED:  # CISPO is that, where the old policy is the engine's
        cap = bounds(given[CORRECTION + "rollout_is_threshold"])[1]
        result.put_class("model.loss", "CISPO", clip_low=1.0, clip_high=cap - 1)
    else:
        result.put_class("model.loss", "PPOClip", **clips, dual_clip=dual)
        result.remarks.append("clip_ratio_c is PPOClip.dual_clip: on by default in verl")
        if mode != "vanilla":
            result.leave(given, ACTOR + "policy_loss.loss_mode", "PPOClip is written")
    if mode != "sapo":
        result.idle(given, [ACTOR + "tau_pos", ACTOR + "tau_neg"], f"loss_mode {mode}")
    _aggregation(given, result, mode)
    if given[ACTOR + "entropy_coeff"]:
        result.put_class("model.entropy", "EntropyBonus", coef=given[ACTOR + "entropy_coeff"])


def _aggregation(given: Given, result: Conversion, loss_mode: str) -> None:
    said = given[ACTOR + "loss_agg_mode"]
    mode = "seq-mean-token-mean" if loss_mode in BY_SEQUENCE else said
    # Responses are padded to their greatest length, which stands in for null.
    factor = ACTOR + "loss_scale_factor"
    longest = given.look(factor) or given.look("data.max_response_length")
    known = {
        "token-mean": instance("TokenMean"),
        "seq-mean-token-mean": instance("SequenceMean"),
        "seq-mean-token-sum": instance("TokenSum", max_tokens=1),
        "seq-mean-token-sum-norm": instance("TokenSum", max_tokens=longest),
    }
    result.put("model.aggregation", known.get(mode, known["token-mean"]))
    if mode == "seq-mean-token-sum-norm":
        given.cover(factor)
    else:
        result.idle(given, [factor], f"loss_agg_mode {mode}")
    if mode not in known:
        result.leave(given, ACTOR + "loss_agg_mode")
    if mode != said:
        _averaged_apart(given, result, loss_mode)


def _averaged_apart(given: Given, result: Conversion, loss_mode: str) -> None:
    """Note what ``loss_agg_mode`` does with a loss that ignores it."""
    name = ACTOR + "loss_agg_mode"
    value = given[name]
    if loss_mode == "gspo":
        result.remarks.append(
            f"{name} {value}: verl 0.9.0 averages gspo over each sequence, then over sequences, "
            "whatever this says: SequenceMean is written. verl 0.9.1 respects it"
        )
    parts = {
        "entropy_coeff": given.look(ACTOR + "entropy_coeff"),
        "use_kl_loss": given.look(ACTOR + "use_kl_loss"),
        "the critic": given.look("algorithm.adv_estimator") == "gae",
    }
    if others := [part for part, on in parts.items() if on]:
        result.leave(
            given,
            name,
            f"verl averages {loss_mode} by sequences, but by this what belongs to "
            f"{' and '.join(others)}; here all is averaged by sequences",
        )


def _advantage(given: Given, result: Conversion) -> None:
    """Set the advantage, and the critic that it needs."""
    key = "algorithm.adv_estimator"
    name, alone = str(given[key]), group_size(given) == 1
    if name == "gae":
        _critic(given, result)
    elif name.startswith("reinforce_plus_plus"):
        _reinforce_plus_plus(given, result, name.endswith("baseline") and not alone)
    elif name == "remax":
        result.put_class("model.advantage", "ReMax")
    elif alone:
        result.put_class("model.advantage", "RunningBaseline")
        result.leave(given, key)
    elif name in ("rloo", "rloo_vectorized"):
        result.put_class("model.advantage", "RLOO")
    else:
        normalize = given["algorithm.norm_adv_by_std_in_grpo"]
        result.put_class("model.advantage", "GRPO", normalize_std=normalize, eps=1e-6)
        if name not in ("grpo", "grpo_vectorized"):
            result.leave(given, key)


def _reinforce_plus_plus(given: Given, result: Conversion, baseline: bool) -> None:
    result.put_class("model.advantage", "ReinforcePlusPlus", group_baseline=baseline, unbiased=True)
    if given["algorithm.gamma"] != 1 and not baseline:
        result.leave(given, "algorithm.gamma")
    if baseline and given.look("algorithm.use_kl_in_reward"):
        result.leave(given, "algorithm.use_kl_in_reward")


def _critic(given: Given, result: Conversion) -> None:
    gamma, lam = given["algorithm.gamma"], given["algorithm.lam"]
    result.put_class("model.advantage", "GAE", gamma=gamma, lam=lam, whiten=True, unbiased=True)
    result.put_class("model.critic.head", "SeparateValueHead")
    result.put("model.critic.loss", {"coef": 1.0, "clip": given["critic.cliprange_value"]})
    result.put("model.critic.lr", given["critic.optim.lr"])
    averaged = (given.look(place + "loss_agg_mode") for place in ("critic.", ACTOR))
    if given.says("critic.loss_agg_mode") and len(set(averaged)) > 1:
        result.leave(given, "critic.loss_agg_mode")
    if given["trainer.critic_warmup"]:
        result.put("model.critic.warmup_iterations", given["trainer.critic_warmup"])
    result.remarks.append("the critic's loss is half a squared error in both: ValueLoss.coef is 1")


def _penalties(given: Given, result: Conversion) -> None:
    """Set the KL in the loss and in the reward."""
    if given[ACTOR + "use_kl_loss"] and given[ACTOR + "kl_loss_coef"]:
        name = str(given[ACTOR + "kl_loss_type"])
        if name.endswith("+") and name.removesuffix("+") in ESTIMATORS:
            # A straight-through estimate: its own value, and k2's gradient.
            written: tuple[str, dict[str, Any]] = "K2Penalty", {}
            if ESTIMATORS[name.removesuffix("+")] != "K2":
                result.remarks.append(
                    f"{ACTOR}kl_loss_type {name}: K2Penalty has the gradient that verl gives it; "
                    "the KL that is logged is k2's"
                )
        else:
            written = _estimator(given, result, ACTOR + "kl_loss_type")
        kind, options = written
        result.put_class("model.kl", kind, coef=given[ACTOR + "kl_loss_coef"], **options)
    if given["algorithm.use_kl_in_reward"] and given["algorithm.kl_ctrl.kl_coef"]:
        kind, options = _estimator(given, result, "algorithm.kl_penalty")
        result.put_class("model.kl_reward", kind, coef=_coefficient(given, result), **options)


def _coefficient(given: Given, result: Conversion) -> Any:
    coef = given["algorithm.kl_ctrl.kl_coef"]
    if given["algorithm.kl_ctrl.type"] != "adaptive":
        return coef
    rollouts = given.look("data.train_batch_size") * group_size(given)
    result.remarks.append(
        "algorithm.kl_ctrl.type adaptive: verl measures the KL as a mean over sequences of their "
        "mean over tokens, AdaptiveCoefficient as one mean over tokens"
    )
    return instance(
        "lightning_rl.extend.AdaptiveCoefficient",
        value=coef,
        target=given["algorithm.kl_ctrl.target_kl"],
        gain=rollouts / given["algorithm.kl_ctrl.horizon"],
    )


def _estimator(given: Given, result: Conversion, key: str) -> tuple[str, dict[str, Any]]:
    """Return the penalty that a value names, and its options; a ``+`` only concerns gradients."""
    name = str(given[key]).removesuffix("+")
    if name not in ESTIMATORS:
        result.leave(given, key, "K3Penalty is written: another estimate of the same KL")
    kind = ESTIMATORS.get(name, "K3")
    return f"{kind}Penalty", {"cap": KL_CAP} if kind == "K3" else {}


def _optimizer(given: Given, result: Conversion, total: int | None) -> None:
    """Set AdamW, its schedule and the gradient bound; ``total`` optimizer steps."""
    name = ACTOR + "optim."
    if len(given[name + "betas"]) != 2:
        raise ConfigError(f"{name}betas={given[name + 'betas']}: it takes two numbers")
    result.put_class(
        "model.optimizer",
        "torch.optim.AdamW",
        lr=given[name + "lr"],
        weight_decay=given[name + "weight_decay"],
        betas=list(given[name + "betas"]),
        fused=True,
    )
    newer = name + "clip_grad"  # a configuration that verl wrote has the older one, too
    unset = given.look(newer) == given.row(newer).default
    result.put("model.update.max_grad_norm", given[ACTOR + "grad_clip" if unset else newer])
    kind, warmup = given[name + "lr_scheduler_type"], given[name + "lr_warmup_steps"]
    if warmup is None or warmup <= 0:
        share = given.look(name + "lr_warmup_steps_ratio")
        warmup = round((share or 0.0) * total) if total is not None else 0
        if total is not None:
            given.cover(name + "lr_warmup_steps_ratio")
        elif share:
            result.leave(given, name + "lr_warmup_steps_ratio", "set trainer.total_training_steps")
    if kind == "cosine" and total is not None:
        steps = {"warmup_steps": warmup, "total_steps": total}
        final = given[name + "min_lr_ratio"] or 0.0
        result.put_class("model.lr_scheduler", "WarmupCosine", **steps, final=final)
        return
    if kind == "cosine":
        result.leave(given, name + "lr_scheduler_type", "set trainer.total_training_steps")
    if warmup:
        result.put_class("model.lr_scheduler", "WarmupConstant", warmup_steps=warmup)
