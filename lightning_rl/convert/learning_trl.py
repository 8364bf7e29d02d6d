"""The half of a GRPOConfig that defines the update: loss, advantages, optimizer."""

from dataclasses import dataclass
from typing import Any

from lightning_rl.convert.conversion import Conversion, Given, instance

EPS = 1e-4
"""TRL adds this to a standard deviation of rewards."""
GREATEST_RATIO = 1e9
"""Stands for no upper bound."""
_SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
_VESPO = {
    "k_positive": "vespo_k_pos",
    "rate_positive": "vespo_lambda_pos",
    "k_negative": "vespo_k_neg",
    "rate_negative": "vespo_lambda_neg",
}
_UNUSED = {
    "cispo": ("delta", *_SAPO, *_VESPO.values()),
    "sapo": ("delta", "epsilon_high", *_VESPO.values()),
    "vespo": ("delta", "epsilon", "epsilon_high", *_SAPO),
}
"""Parameters that have no effect in TRL with a loss."""
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that are PPO's clipped loss; they differ only in how they average."""


@dataclass(frozen=True)
class Updates:
    """Optimizer steps of an iteration: ``minibatches`` in each of ``epochs`` passes.

    One step takes ``micro_batches``, counted over all processes.
    """

    minibatches: int
    epochs: int
    micro_batches: int

    @property
    def steps(self) -> int:
        """Number of optimizer steps of an iteration."""
        return self.minibatches * self.epochs


def carry(given: Given, result: Conversion, updates: Updates) -> None:
    """Carry over what defines the loss."""
    _loss(given, result)
    _aggregation(given, result, updates)
    _entropy(given, result, updates)
    _advantage(given, result)
    _correction(given, result)
    _reference(given, result, updates.steps)


def _loss(given: Given, result: Conversion) -> None:
    kind, low = given["loss_type"], given["epsilon"]
    high = low if given["epsilon_high"] is None else given["epsilon_high"]
    result.idle(given, _UNUSED.get(kind, (*_SAPO, *_VESPO.values())), f"loss_type {kind}")
    sequence = result.choose(given, "importance_sampling_level") == "sequence"
    if kind == "cispo":
        _cispo(high, result, given)
    elif kind == "sapo":
        positive, negative = given["sapo_temperature_pos"], given["sapo_temperature_neg"]
        result.put_class("model.loss", "SAPO", tau_positive=positive, tau_negative=negative)
    elif kind == "vespo":
        result.put_class(
            "model.loss", "VESPO", **{o: given[theirs] for o, theirs in _VESPO.items()}
        )
    else:
        if kind not in CLIPPED:
            result.leave(given, "loss_type", "there is no such loss here; PPOClip is written")
        _clipped(given, result, "GSPO" if sequence else "PPOClip", low, high)
    if sequence and kind in ("cispo", "sapo"):
        result.leave(given, "importance_sampling_level")
    if (threshold := given["off_policy_mask_threshold"]) is not None:
        inner = result.config["model"]["init_args"]["loss"]
        result.put_class("model.loss", "OffPolicyMask", loss=inner, threshold=threshold)


def _clipped(given: Given, result: Conversion, name: str, low: float, high: float) -> None:
    """Set PPO's loss; TRL's ``delta`` bounds w itself, so it also caps gains below 1 +
    epsilon_high.
    """
    delta = given["delta"]
    clips: dict[str, float] = {"clip_low": low, "clip_high": high}
    if delta is not None and delta <= 1:
        result.leave(given, "delta")
    elif delta is not None and delta < 1 + high:
        clips |= {"clip_high": delta - 1, "dual_clip": 1 + high}
        result.remarks.append(
            f"delta {delta:g} is below 1 + epsilon_high: it bounds gains, so clip_high is "
            f"{delta - 1:g}, and losses are bounded at 1 + epsilon_high: dual_clip {1 + high:g}"
        )
    elif delta is not None:
        clips["dual_clip"] = delta
    result.put_class("model.loss", name, **clips)


def _aggregation(given: Given, result: Conversion, updates: Updates) -> None:
    kind = given["loss_type"]
    if kind in ("grpo", "sapo"):
        # TRL divides by all completions, which are more only where some have no loss.
        everyone = {"all_rollouts": True} if given["mask_truncated_completions"] else {}
        result.put_class("model.aggregation", "SequenceMean", **everyone)
    elif kind in ("dr_grpo", "luspo"):
        longest = 1 if kind == "luspo" else given.look("max_completion_length")
        result.put_class("model.aggregation", "TokenSum", max_tokens=longest)
    else:
        result.put_class("model.aggregation", "TokenMean")
    by_step = kind in ("dapo", "cispo", "vespo") and updates.minibatches > 1
    if by_step or (kind == "bnpo" and updates.micro_batches > 1):
        result.leave(given, "loss_type")
    if given["mask_truncated_completions"]:
        result.put("model.update.mask_truncated", True)


def _entropy(given: Given, result: Conversion, updates: Updates) -> None:
    coef = given["entropy_coef"]
    if given["use_adaptive_entropy"]:
        coef = _adaptive_entropy(given, result, updates.steps)
    if not coef:
        return
    result.put_class("model.entropy", "EntropyBonus", coef=coef)
    mean = given.look("loss_type") in ("dapo", "bnpo", "cispo", "vespo")
    if not mean or updates.micro_batches > 1 or updates.minibatches > 1:
        result.leave(given, "entropy_coef")


def _adaptive_entropy(given: Given, result: Conversion, steps: int) -> dict[str, Any]:
    """Return the schedule; TRL's takes a step after each of the ``steps`` of an iteration."""
    if steps > 1:
        result.leave(given, "use_adaptive_entropy")
    return instance(
        "lightning_rl.extend.AdaptiveEntropy",
        value=given["entropy_coef"],
        target=given["entropy_target"],
        step=given["entropy_coef_delta"] * steps,
        low=given["entropy_coef_min"],
        high=given["entropy_coef_max"],
    )


def _cispo(high: float, result: Conversion, given: Given) -> None:
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


def _advantage(given: Given, result: Conversion) -> None:
    if result.choose(given, "multi_objective_aggregation") == "normalize_then_sum":
        result.idle(given, ["scale_rewards"], "multi_objective_aggregation")
        result.put_class("model.advantage", "GDPO", eps=EPS)
        return
    scale = given["scale_rewards"]
    scale = scale.lower() if isinstance(scale, str) else scale
    if scale in (True, "group", "true"):
        result.put_class("model.advantage", "GRPO", normalize_std=True, eps=EPS)
    elif scale in (False, "none", "false"):
        result.put_class("model.advantage", "GRPO", normalize_std=False)
    else:
        result.put_class("model.advantage", "ReinforcePlusPlus", group_baseline=True)
        result.leave(given, "scale_rewards")


def _correction(given: Given, result: Conversion) -> None:
    if not given.look("use_vllm") or not given["vllm_importance_sampling_correction"]:
        return
    low, high = (given[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
    high = given["vllm_importance_sampling_cap"] or high
    level, _, kind = str(result.choose(given, "vllm_importance_sampling_mode")).partition("_")
    if given["loss_type"] == "vespo":
        result.leave(given, "vllm_importance_sampling_correction")
        return
    name = f"{level.capitalize()}{'TIS' if kind == 'truncate' else 'MIS'}"
    bound = GREATEST_RATIO if high is None else float(high)
    if bound <= 1 or (low or 0.0) >= 1:
        result.leave(
            given,
            f"vllm_importance_sampling_clip_{'max' if bound <= 1 else 'min'}",
            "here the bounds must include a weight of 1; no correction is written",
        )
    elif kind == "mask":
        result.put_class("model.correction", name, low=float(low or 0.0), high=bound)
    else:
        result.put_class("model.correction", name, cap=bound)
        if low is not None:
            result.leave(given, "vllm_importance_sampling_clip_min")


def _reference(given: Given, result: Conversion, steps: int) -> None:
    if not given["beta"]:
        return
    # The gradient of k3 x ratio is that of k2 times the ratio: w (log p - log p_ref) d log p.
    corrected = given["use_bias_correction_kl"]
    result.put_class("model.kl", "K2Penalty" if corrected else "K3Penalty", coef=given["beta"])
    key = "use_bias_correction_kl"
    if corrected and (steps > 1 or given["importance_sampling_level"] == "sequence"):
        result.leave(given, key)
    elif corrected:
        result.remarks.append(
            f"{key}: K2Penalty has the gradient of TRL's k3 x ratio, since the ratio is 1; the "
            "KL that is logged is k2's"
        )
    if given["sync_ref_model"]:
        every = max(1, round(given["ref_model_sync_steps"] / steps))
        result.put_class("model.reference", "PeriodicReference", every_n_iterations=every)
        if given["ref_model_mixup_alpha"] != 1.0:
            result.leave(given, "ref_model_mixup_alpha")
    elif given.look("use_peft"):
        result.put_class("model.reference", "BaseReference")


def put_optimizer(given: Given, result: Conversion, total: int | None) -> None:
    """Set the optimizer and its schedule; ``total`` is the run's optimizer steps, if known."""
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
        result.remarks.append("weight_decay acts on all weights; TRL exempts biases and norms")
    _scheduler(given, result, total)


def _scheduler(given: Given, result: Conversion, total: int | None) -> None:
    kind = str(given["lr_scheduler_type"]).removeprefix("SchedulerType.").lower()
    warmup = given.look("warmup_ratio") or given.look("warmup_steps")
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
        result.leave(given, "lr_scheduler_type", "a constant learning rate is written")
        return
    decays = shapes[kind] != "WarmupConstant"
    if total is None and (decays or 0 < warmup < 1):
        result.missing.append(
            f"model.lr_scheduler: lr_scheduler_type {kind} needs the number of optimizer steps "
            "(set max_steps); the rate is constant now"
        )
        return
    given.cover("warmup_ratio", "warmup_steps")
    options: dict[str, Any] = {"warmup_steps": int(warmup)}
    if decays:
        options["total_steps"] = total
    if kind == "cosine_with_min_lr":
        options["final"] = (given["lr_scheduler_kwargs"] or {}).get("min_lr_rate", 0.0)
    if decays or warmup:
        result.put_class("model.lr_scheduler", shapes[kind], **options)
