"""The half of a GRPOConfig that the update is made of: loss, advantages, reference, optimizer."""

from typing import Any

from lightning_rl.cli.convert.rows import Conversion, Given

EPS = 1e-4
"""What TRL adds to a standard deviation of rewards."""
GREATEST_RATIO = 1e9
"""Stands for no upper bound."""


def loss(given: Given, result: Conversion) -> None:
    kind, low = given["loss_type"], given["epsilon"]
    high = low if given["epsilon_high"] is None else given["epsilon_high"]
    tokens = given.look("max_completion_length")
    if kind in ("grpo", "sapo"):
        result.put_class("model.aggregation", "SequenceMean")
    elif kind == "dr_grpo":
        result.put_class("model.aggregation", "TokenSum", max_tokens=tokens)
    else:
        result.put_class("model.aggregation", "TokenMean")
    if kind in ("luspo", "vespo"):
        result.leave(given, "loss_type", "there is no such loss; PPOClip with TokenMean is written")
    if kind == "cispo":
        _cispo(high, result, given)
    elif kind == "sapo":
        result.put_class(
            "model.loss",
            "SAPO",
            tau_positive=given["sapo_temperature_pos"],
            tau_negative=given["sapo_temperature_neg"],
        )
    elif given["importance_sampling_level"] == "sequence":
        result.put_class("model.loss", "GSPO", clip_low=low, clip_high=high)
    else:
        dual = {} if given["delta"] is None else {"dual_clip": given["delta"]}
        result.put_class("model.loss", "PPOClip", clip_low=low, clip_high=high, **dual)
    if given["mask_truncated_completions"]:
        result.put("model.mask_truncated", True)
    if given["entropy_coef"]:
        result.put_class("model.entropy", "EntropyBonus", coef=given["entropy_coef"])
        if kind in ("grpo", "sapo", "dr_grpo"):
            result.remarks.append(
                "entropy_coef is the weight of the mean over tokens in TRL; here the bonus is "
                "averaged as the loss is"
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


def advantage(given: Given, result: Conversion) -> None:
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


def correction(given: Given, result: Conversion) -> None:
    if not given["vllm_importance_sampling_correction"] or not given.look("use_vllm"):
        return
    low, high = (
        given["vllm_importance_sampling_clip_min"],
        given["vllm_importance_sampling_clip_max"],
    )
    high = given["vllm_importance_sampling_cap"] or high
    mode = given["vllm_importance_sampling_mode"]
    level, _, kind = mode.partition("_")
    name = f"{level.capitalize()}{'TIS' if kind == 'truncate' else 'MIS'}"
    bound = GREATEST_RATIO if high is None else float(high)
    if kind == "mask":
        result.put_class("model.correction", name, low=float(low or 0.0), high=bound)
        return
    result.put_class("model.correction", name, cap=bound)
    if low is not None:
        result.leave(given, "vllm_importance_sampling_clip_min", "TIS has no lower bound here")


def reference(given: Given, result: Conversion, steps: int) -> None:
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


def optimizer(given: Given, result: Conversion, total: int | None) -> None:
    name = str(given["optim"]).removeprefix("OptimizerNames.").lower()
    options: dict[str, Any] = {"lr": given["learning_rate"], "weight_decay": given["weight_decay"]}
    if name == "sgd":
        kind = "SGD"
    elif name == "adafactor":
        kind = "Adafactor"
    else:
        kind = "AdamW"
        options |= {
            "betas": [given["adam_beta1"], given["adam_beta2"]],
            "eps": given["adam_epsilon"],
        }
        options["fused"] = True
        if not name.startswith("adamw_torch"):
            result.leave(given, "optim", "torch.optim.AdamW is written")
    result.put_class("model.optimizer", f"torch.optim.{kind}", **options)
    if given["weight_decay"]:
        result.remarks.append("weight_decay acts on all weights; TRL spares biases and norms")
    norm = given["max_grad_norm"]
    result.put("model.max_grad_norm", norm if norm else None)
    _scheduler(given, result, total)


def _scheduler(given: Given, result: Conversion, total: int | None) -> None:
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
