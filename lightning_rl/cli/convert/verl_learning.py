"""The half of verl's configuration that the update is made of."""

from typing import Any

from lightning_rl.cli.convert.rows import Conversion, Given, instance
from lightning_rl.errors import ConfigError

_ACTOR, _CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
ESTIMATORS = {"kl": "K1", "k1": "K1", "mse": "K2", "k2": "K2", "low_var_kl": "K3", "k3": "K3"}


def batches(given: Given, result: Conversion) -> int:
    """Sizes in prompts, as both count them; returns the optimizer steps of an iteration.

    Raises:
        ConfigError: if a batch is no whole number of minibatches.
    """
    prompts, size = given["data.train_batch_size"], given[_ACTOR + "ppo_mini_batch_size"]
    size = min(size, prompts)
    if prompts % size:
        raise ConfigError(
            f"data.train_batch_size={prompts} is no multiple of ppo_mini_batch_size={size}"
        )
    result.put("data.group_size", given["actor_rollout_ref.rollout.n"])
    result.put("data.groups_per_iteration", prompts)
    result.put("model.minibatches", prompts // size)
    result.put("model.ppo_epochs", given[_ACTOR + "ppo_epochs"])
    if given[_ACTOR + "use_dynamic_bsz"] or given.says(_ACTOR + "ppo_max_token_len_per_gpu"):
        result.put("model.max_tokens_per_pack", given[_ACTOR + "ppo_max_token_len_per_gpu"])
    return int(prompts // size * given[_ACTOR + "ppo_epochs"])


def loss(given: Given, result: Conversion) -> None:
    """Loss and aggregation."""
    both = given[_ACTOR + "clip_ratio"]
    low, high = given[_ACTOR + "clip_ratio_low"], given[_ACTOR + "clip_ratio_high"]
    if given.says(_ACTOR + "clip_ratio") and low is not None and high is not None:
        result.remarks.append(
            f"{_ACTOR}clip_ratio {both:g} has no effect in verl beside clip_ratio_low {low:g} and "
            f"clip_ratio_high {high:g}, which are written"
        )
    clips = {"clip_low": both if low is None else low, "clip_high": both if high is None else high}
    mode = given[_ACTOR + "policy_loss.loss_mode"]
    dual = given[_ACTOR + "clip_ratio_c"]
    if mode == "gspo":
        result.put_class("model.loss", "GSPO", **clips)
    elif mode == "cispo":
        result.put_class("model.loss", "CISPO", **clips)
    elif mode == "sapo":
        taus = {
            "tau_positive": given[_ACTOR + "tau_pos"],
            "tau_negative": given[_ACTOR + "tau_neg"],
        }
        result.put_class("model.loss", "SAPO", **taus)
    elif mode == "gpg":
        result.put_class("model.loss", "Reinforce")
    else:
        result.put_class("model.loss", "PPOClip", **clips, dual_clip=dual)
        result.remarks.append("clip_ratio_c is PPOClip.dual_clip: on in verl without being asked")
        if mode != "vanilla":
            result.leave(given, _ACTOR + "policy_loss.loss_mode", "PPOClip is written")
    _aggregation(given, result, mode)
    if given[_ACTOR + "entropy_coeff"]:
        result.put_class("model.entropy", "EntropyBonus", coef=given[_ACTOR + "entropy_coeff"])


def _aggregation(given: Given, result: Conversion, loss_mode: str) -> None:
    mode = "seq-mean-token-mean" if loss_mode == "sapo" else given[_ACTOR + "loss_agg_mode"]
    longest = given[_ACTOR + "loss_scale_factor"] or given.look("data.max_response_length")
    if mode == "seq-mean-token-mean":
        result.put_class("model.aggregation", "SequenceMean")
    elif mode == "seq-mean-token-sum":
        result.put_class("model.aggregation", "TokenSum", max_tokens=1)
    elif mode == "seq-mean-token-sum-norm":
        result.put_class("model.aggregation", "TokenSum", max_tokens=int(longest))
    else:
        result.put_class("model.aggregation", "TokenMean")
        if mode != "token-mean":
            result.leave(given, _ACTOR + "loss_agg_mode", "TokenMean is written")


def advantage(given: Given, result: Conversion) -> None:
    """Advantage, and the critic that it needs."""
    name = str(given["algorithm.adv_estimator"])
    given.cover("critic.enable", "critic.ppo_epochs", "critic.ppo_mini_batch_size")
    if name in ("grpo", "grpo_vectorized"):
        normalize = given["algorithm.norm_adv_by_std_in_grpo"]
        result.put_class("model.advantage", "GRPO", normalize_std=normalize, eps=1e-6)
    elif name in ("rloo", "rloo_vectorized"):
        result.put_class("model.advantage", "RLOO")
    elif name.startswith("reinforce_plus_plus"):
        baseline = name.endswith("baseline")
        result.put_class("model.advantage", "ReinforcePlusPlus", group_baseline=baseline)
        if given["algorithm.gamma"] != 1:
            result.leave(given, "algorithm.gamma", "the reward-to-go is not discounted")
    elif name == "gae":
        _critic(given, result)
    else:
        result.leave(given, "algorithm.adv_estimator", "GRPO is written")
        result.put_class("model.advantage", "GRPO")


def _critic(given: Given, result: Conversion) -> None:
    gamma, lam = given["algorithm.gamma"], given["algorithm.lam"]
    result.put_class("model.advantage", "GAE", gamma=gamma, lam=lam, whiten=True)
    result.put_class("model.value_head", "SeparateValueHead")
    result.put("model.value_loss", {"coef": 1.0, "clip": given["critic.cliprange_value"]})
    result.put("model.value_lr", given["critic.optim.lr"])
    given.cover("critic.grad_clip", "critic.loss_agg_mode")  # as the policy's
    if given["trainer.critic_warmup"]:
        result.put("model.value_warmup_iterations", given["trainer.critic_warmup"])
    result.remarks.append("the critic's loss is half a squared error in both: ValueLoss.coef is 1")


def correction(given: Given, result: Conversion) -> None:
    """Importance weights; ours is one, so rejection goes before truncation."""
    truncated, rejected = given[_CORRECTION + "rollout_is"], given[_CORRECTION + "rollout_rs"]
    masks = {"token_k1": "TokenMIS", "seq_sum_k1": "SequenceMIS", "seq_mean_k1": "GeometricMIS"}
    if rejected is not None and rejected not in masks:
        result.leave(given, _CORRECTION + "rollout_rs", "there is no rejection by this estimate")
        rejected = None
    if rejected is not None:
        low, high = _bounds(given[_CORRECTION + "rollout_rs_threshold"])
        low = 1 / high if low is None else low
        result.put_class("model.correction", masks[rejected], low=low, high=high)
        if truncated is None:
            result.remarks.append("what rollout_rs keeps has weight 1 in verl, its own weight here")
        else:
            result.leave(given, _CORRECTION + "rollout_is", "there is one correction: rejection")
    elif truncated is not None:
        level = "Sequence" if truncated == "sequence" else "Token"
        low, high = _bounds(given[_CORRECTION + "rollout_is_threshold"])
        if low is None:
            result.put_class("model.correction", f"{level}TIS", cap=high)
        else:  # two bounds: what is outside weighs nothing
            result.put_class("model.correction", f"{level}MIS", low=low, high=high)
    if given[_CORRECTION + "bypass_mode"]:
        result.put("model.trust_engine_logprobs", True)


def _bounds(threshold: Any) -> tuple[float | None, float]:
    """The lower and the upper of ``low_high``; a number alone is the upper one."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)


def penalties(given: Given, result: Conversion) -> None:
    """KL in the loss, and in the reward."""
    if given[_ACTOR + "use_kl_loss"]:
        kind = _estimator(given, result, _ACTOR + "kl_loss_type")
        result.put_class("model.kl", kind, coef=given[_ACTOR + "kl_loss_coef"])
    if given["algorithm.use_kl_in_reward"]:
        coef: Any = given["algorithm.kl_ctrl.kl_coef"]
        if given["algorithm.kl_ctrl.type"] == "adaptive":
            rollouts = given.look("data.train_batch_size") * given.look(
                "actor_rollout_ref.rollout.n"
            )
            coef = instance(
                "lightning_rl.AdaptiveCoefficient",
                value=coef,
                target=given["algorithm.kl_ctrl.target_kl"],
                gain=rollouts / given["algorithm.kl_ctrl.horizon"],
            )
        kind = _estimator(given, result, "algorithm.kl_penalty")
        result.put_class("model.kl_reward", kind, coef=coef)


def _estimator(given: Given, result: Conversion, key: str) -> str:
    name = str(given[key])
    if name.endswith("+"):  # another value, but k2's gradient
        return "K2Penalty"
    if name not in ESTIMATORS:
        result.leave(given, key, "K3Penalty is written")
    return f"{ESTIMATORS.get(name, 'K3')}Penalty"


def optimizer(given: Given, result: Conversion, total: int | None) -> None:
    """AdamW, its schedule, and the bound of the gradient; ``total`` optimizer steps."""
    name = _ACTOR + "optim."
    result.put_class(
        "model.optimizer",
        "torch.optim.AdamW",
        lr=given[name + "lr"],
        weight_decay=given[name + "weight_decay"],
        betas=list(given[name + "betas"]),
        fused=True,
    )
    result.put("model.max_grad_norm", given[_ACTOR + "grad_clip"])
    kind, warmup = given[name + "lr_scheduler_type"], given[name + "lr_warmup_steps"]
    share = given[name + "lr_warmup_steps_ratio"]
    final = given[name + "min_lr_ratio"]
    if warmup < 0:
        warmup = round(share * total) if total is not None else 0
        if share and total is None:
            result.leave(given, name + "lr_warmup_steps_ratio", "set trainer.total_training_steps")
    if kind == "cosine" and total is not None:
        result.put_class(
            "model.lr_scheduler",
            "WarmupCosine",
            warmup_steps=warmup,
            total_steps=total,
            final=final or 0.0,
        )
        return
    if kind == "cosine":
        result.leave(given, name + "lr_scheduler_type", "set trainer.total_training_steps")
    if warmup:
        result.put_class("model.lr_scheduler", "WarmupConstant", warmup_steps=warmup)
