"""The half of a configuration that the update is made of: loss, advantages, optimizer."""

from typing import Any

from lightning_rl.cli.convert.conversion import Conversion, Given, instance

_ACTOR, _CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
ESTIMATORS = {"kl": "K1", "k1": "K1", "mse": "K2", "k2": "K2", "low_var_kl": "K3", "k3": "K3"}

EPS = 1e-4
"""What TRL adds to a standard deviation of rewards."""
GREATEST_RATIO = 1e9
"""Stands for no upper bound."""


def trl(given: Given, result: Conversion, steps: int, total: int | None) -> None:
    """Carry over a GRPOConfig's half: ``steps`` an iteration, ``total`` of the run, if it tells."""
    _trl_loss(given, result)
    _trl_advantage(given, result)
    _trl_correction(given, result)
    _trl_reference(given, result, steps)
    _trl_optimizer(given, result, total)


_TRL_AGGREGATIONS = {"grpo": "SequenceMean", "sapo": "SequenceMean", "dr_grpo": "TokenSum"}
"""By the loss; of all others ``TokenMean``."""


def _trl_loss(given: Given, result: Conversion) -> None:
    kind, low = given["loss_type"], given["epsilon"]
    high = low if given["epsilon_high"] is None else given["epsilon_high"]
    aggregation = _TRL_AGGREGATIONS.get(kind, "TokenMean")
    longest = {"max_tokens": given.look("max_completion_length")}
    result.put_class(
        "model.aggregation", aggregation, **(longest if aggregation == "TokenSum" else {})
    )
    if kind in ("luspo", "vespo"):
        result.leave(given, "loss_type", "there is no such loss; PPOClip with TokenMean is written")
    if kind == "cispo":
        _trl_cispo(high, result, given)
    elif kind == "sapo":
        positive, negative = given["sapo_temperature_pos"], given["sapo_temperature_neg"]
        result.put_class("model.loss", "SAPO", tau_positive=positive, tau_negative=negative)
    elif given["importance_sampling_level"] == "sequence":
        result.put_class("model.loss", "GSPO", clip_low=low, clip_high=high)
    else:
        dual = {} if given["delta"] is None else {"dual_clip": given["delta"]}
        result.put_class("model.loss", "PPOClip", clip_low=low, clip_high=high, **dual)
    if given["mask_truncated_completions"]:
        result.put("model.mask_truncated", True)
    if given["entropy_coef"]:
        result.put_class("model.entropy", "EntropyBonus", coef=given["entropy_coef"])
        if aggregation != "TokenMean":
            result.remarks.append(
                "entropy_coef is the weight of the mean over tokens in TRL; here the bonus is "
                "averaged as the loss is"
            )


def _trl_cispo(high: float, result: Conversion, given: Given) -> None:
    if high <= 1:
        result.leave(
            given,
            "epsilon_high",
            f"with cispo it bounds the ratio itself, at {high:g}: every weight would be cut; "
            "CISPO's default is written (TRL recommends 5, which is clip_high 4)",
        )
        result.put_class("model.loss", "CISPO")
        return
    result.put_class("model.loss", "CISPO", clip_low=1.0, clip_high=high - 1)
    result.remarks.append(
        f"cispo's epsilon_high {high:g} bounds the ratio, clip_high {high - 1:g} what exceeds 1"
    )


def _trl_advantage(given: Given, result: Conversion) -> None:
    scale = given["scale_rewards"]
    if scale in (True, "group"):
        result.put_class("model.advantage", "GRPO", normalize_std=True, eps=EPS)
    elif scale in (False, "none"):
        result.put_class("model.advantage", "GRPO", normalize_std=False)
    else:
        result.put_class("model.advantage", "ReinforcePlusPlus", group_baseline=True)
        result.leave(
            given,
            "scale_rewards",
            "nearest is what is written, whose standard deviation is over tokens",
        )


def _trl_correction(given: Given, result: Conversion) -> None:
    if not given["vllm_importance_sampling_correction"] or not given.look("use_vllm"):
        return
    low, high = (given[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
    high = given["vllm_importance_sampling_cap"] or high
    level, _, kind = given["vllm_importance_sampling_mode"].partition("_")
    name = f"{level.capitalize()}{'TIS' if kind == 'truncate' else 'MIS'}"
    bound = GREATEST_RATIO if high is None else float(high)
    if kind == "mask":
        result.put_class("model.correction", name, low=float(low or 0.0), high=bound)
        return
    result.put_class("model.correction", name, cap=bound)
    if low is not None:
        result.leave(given, "vllm_importance_sampling_clip_min", "TIS has no lower bound here")


def _trl_reference(given: Given, result: Conversion, steps: int) -> None:
    if not given["beta"]:
        return
    # k3 x ratio, where the ratio is 1, has the gradient of k2: d log p (log p - log p_ref).
    corrected = given["use_bias_correction_kl"]
    kind = "K2Penalty" if corrected else "K3Penalty"
    result.put_class("model.kl", kind, coef=given["beta"])
    if corrected:
        result.remarks.append(
            "use_bias_correction_kl: K2Penalty has the same gradient as TRL's k3 x ratio where "
            "the ratio is 1"
        )
    if given["sync_ref_model"]:
        every = max(1, round(given["ref_model_sync_steps"] / steps))
        result.put_class("model.reference", "PeriodicReference", every_n_iterations=every)
        if given["ref_model_mixup_alpha"] != 1.0:
            result.leave(given, "ref_model_mixup_alpha", "a reference is renewed wholly")
    elif given.look("use_peft"):
        result.put_class("model.reference", "BaseReference")


def _trl_optimizer(given: Given, result: Conversion, total: int | None) -> None:
    name = str(given["optim"]).removeprefix("OptimizerNames.").lower()
    options: dict[str, Any] = {"lr": given["learning_rate"], "weight_decay": given["weight_decay"]}
    kind = {"sgd": "SGD", "adafactor": "Adafactor"}.get(name, "AdamW")
    if kind == "AdamW":
        betas = [given["adam_beta1"], given["adam_beta2"]]
        options |= {"betas": betas, "eps": given["adam_epsilon"], "fused": True}
        if not name.startswith("adamw_torch"):
            result.leave(given, "optim", "torch.optim.AdamW is written")
    result.put_class("model.optimizer", f"torch.optim.{kind}", **options)
    if given["weight_decay"]:
        result.remarks.append("weight_decay acts on all weights; TRL spares biases and norms")
    result.put("model.max_grad_norm", given["max_grad_norm"] or None)
    _trl_scheduler(given, result, total)


def _trl_scheduler(given: Given, result: Conversion, total: int | None) -> None:
    kind = str(given["lr_scheduler_type"]).removeprefix("SchedulerType.").lower()
    warmup = given["warmup_ratio"] or given["warmup_steps"]
    if 0 < warmup < 1:
        warmup = round(warmup * total) if total is not None else warmup
    shapes = {
        "linear": "WarmupLinear",
        "cosine": "WarmupCosine",
        "cosine_with_min_lr": "WarmupCosine",
        "constant": "WarmupConstant",
        "constant_with_warmup": "WarmupConstant",
    }
    if kind not in shapes:
        result.leave(given, "lr_scheduler_type", "a constant rate is written")
        return
    decays = shapes[kind] != "WarmupConstant"
    if total is None and (decays or 0 < warmup < 1):
        result.missing.append(
            f"model.lr_scheduler: {kind} needs the number of optimizer steps (set max_steps); the "
            "rate is constant now"
        )
        return
    options: dict[str, Any] = {"warmup_steps": int(warmup)}
    if decays:
        options["total_steps"] = total
    if kind == "cosine_with_min_lr":
        options["final"] = (given["lr_scheduler_kwargs"] or {}).get("min_lr_rate", 0.0)
    if decays or warmup:
        result.put_class("model.lr_scheduler", shapes[kind], **options)


def verl(given: Given, result: Conversion, total: int | None) -> None:
    """Carry over verl's half; the run has ``total`` optimizer steps, where it tells."""
    _verl_loss(given, result)
    _verl_advantage(given, result)
    _verl_correction(given, result)
    _verl_penalties(given, result)
    _verl_optimizer(given, result, total)


def _verl_loss(given: Given, result: Conversion) -> None:
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
    if mode in ("gspo", "cispo"):
        result.put_class("model.loss", mode.upper(), **clips)
    elif mode == "sapo":
        positive, negative = given[_ACTOR + "tau_pos"], given[_ACTOR + "tau_neg"]
        result.put_class("model.loss", "SAPO", tau_positive=positive, tau_negative=negative)
    elif mode == "gpg":
        result.put_class("model.loss", "Reinforce")
    else:
        result.put_class("model.loss", "PPOClip", **clips, dual_clip=dual)
        result.remarks.append("clip_ratio_c is PPOClip.dual_clip: on in verl without being asked")
        if mode != "vanilla":
            result.leave(given, _ACTOR + "policy_loss.loss_mode", "PPOClip is written")
    _verl_aggregation(given, result, mode)
    if given[_ACTOR + "entropy_coeff"]:
        result.put_class("model.entropy", "EntropyBonus", coef=given[_ACTOR + "entropy_coeff"])


def _verl_aggregation(given: Given, result: Conversion, loss_mode: str) -> None:
    mode = "seq-mean-token-mean" if loss_mode == "sapo" else given[_ACTOR + "loss_agg_mode"]
    longest = given[_ACTOR + "loss_scale_factor"] or given.look("data.max_response_length")
    known = {
        "token-mean": instance("TokenMean"),
        "seq-mean-token-mean": instance("SequenceMean"),
        "seq-mean-token-sum": instance("TokenSum", max_tokens=1),
        "seq-mean-token-sum-norm": instance("TokenSum", max_tokens=int(longest)),
    }
    result.put("model.aggregation", known.get(mode, known["token-mean"]))
    if mode not in known:
        result.leave(given, _ACTOR + "loss_agg_mode", "TokenMean is written")


def _verl_advantage(given: Given, result: Conversion) -> None:
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
        _verl_critic(given, result)
    else:
        result.leave(given, "algorithm.adv_estimator", "GRPO is written")
        result.put_class("model.advantage", "GRPO")


def _verl_critic(given: Given, result: Conversion) -> None:
    gamma, lam = given["algorithm.gamma"], given["algorithm.lam"]
    result.put_class("model.advantage", "GAE", gamma=gamma, lam=lam, whiten=True)
    result.put_class("model.value_head", "SeparateValueHead")
    result.put("model.value_loss", {"coef": 1.0, "clip": given["critic.cliprange_value"]})
    result.put("model.value_lr", given["critic.optim.lr"])
    given.cover("critic.grad_clip", "critic.loss_agg_mode")  # as the policy's
    if given["trainer.critic_warmup"]:
        result.put("model.value_warmup_iterations", given["trainer.critic_warmup"])
    result.remarks.append("the critic's loss is half a squared error in both: ValueLoss.coef is 1")


def _verl_correction(given: Given, result: Conversion) -> None:
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


def _verl_penalties(given: Given, result: Conversion) -> None:
    """KL in the loss, and in the reward."""
    if given[_ACTOR + "use_kl_loss"]:
        kind = _estimator(given, result, _ACTOR + "kl_loss_type")
        result.put_class("model.kl", kind, coef=given[_ACTOR + "kl_loss_coef"])
    if given["algorithm.use_kl_in_reward"]:
        coef: Any = given["algorithm.kl_ctrl.kl_coef"]
        if given["algorithm.kl_ctrl.type"] == "adaptive":
            group_size = given.look("actor_rollout_ref.rollout.n")
            rollouts = given.look("data.train_batch_size") * group_size
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


def _verl_optimizer(given: Given, result: Conversion, total: int | None) -> None:
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
    share, final = given[name + "lr_warmup_steps_ratio"], given[name + "min_lr_ratio"] or 0.0
    if warmup < 0:
        warmup = round(share * total) if total is not None else 0
        if share and total is None:
            result.leave(given, name + "lr_warmup_steps_ratio", "set trainer.total_training_steps")
    if kind == "cosine" and total is not None:
        steps = {"warmup_steps": warmup, "total_steps": total}
        result.put_class("model.lr_scheduler", "WarmupCosine", **steps, final=final)
        return
    if kind == "cosine":
        result.leave(given, name + "lr_scheduler_type", "set trainer.total_training_steps")
    if warmup:
        result.put_class("model.lr_scheduler", "WarmupConstant", warmup_steps=warmup)
