"""verl's ``distillation``: a teacher, and what is learned from it beside rewards."""

from collections.abc import Iterable
from typing import Any

from lightning_rl.algos.advantages import GroupAdvantage
from lightning_rl.convert.checked import part_of
from lightning_rl.convert.conversion import Conversion, Given, instance

_MODELS = "distillation.teacher_models."
_LOSS, _TEACHER = "distillation.distillation_loss.", _MODELS + "teacher_model."
_MODE, _AS_REWARD = _LOSS + "loss_mode", _LOSS + "use_policy_gradient"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_BETAS = {"forward_kl_topk": 0.0, "low_var_kl": 0.0, "k3": 0.0}
"""Losses whose gradient, in expectation, is that of the forward KL: ``TeacherDivergence.beta``.
That of the others is the reverse one's, 1.
"""


def teaches_alone(given: Given) -> bool:
    """Return True if nothing is learned from rewards."""
    return bool(given["distillation.enabled"]) and not given[_LOSS + "use_task_rewards"]


def carry_teacher(given: Given, result: Conversion, steps: int) -> None:
    """Add the teacher to the reference or the rewards, and what is learned from it to the update.

    Args:
        given: the values.
        result: what has been converted, with loss and advantage of the rewards, if they have any.
        steps: optimizer steps of an iteration.
    """
    if not given["distillation.enabled"]:
        return
    mode, model = result.choose(given, _MODE), result.config["model"]["init_args"]
    alone, refers = teaches_alone(given), "kl" in model or "kl_reward" in model
    coef = 1.0 if alone else given[_LOSS + "distillation_loss_coef"]
    if given[_ROLLOUT + "temperature"] != 1:
        result.leave(given, _ROLLOUT + "temperature")
    if given[_AS_REWARD] and (alone or isinstance(part_of(model["advantage"]), GroupAdvantage)):
        _advantage(given, result, mode, coef, steps)
    elif not (given[_AS_REWARD] or alone or mode == "forward_kl_topk" or refers):
        _penalty(given, result, mode, coef)
    else:
        _divergence(given, result, mode, coef)


def other_teachers(names: Iterable[str]) -> list[str]:
    """Return a line to fill in if there are several teachers, each for some of the prompts."""
    several = {name.removeprefix(_MODELS).partition(".")[0] for name in names if _MODELS in name}
    if found := sorted(several - {"teacher_model"}):
        return [
            f"data.rewards: {', '.join(found)} are teachers of some of the prompts each: write one "
            "ModelTeacher for each set of prompts (docs/mixtures.md)"
        ]
    return []


def _advantage(given: Given, result: Conversion, mode: str, coef: float, steps: int) -> None:
    """Take the teacher's logprob less the policy's as a token's advantage."""
    arguments: dict[str, Any] = {"coef": coef}
    if teaches_alone(given):
        low, high = (given[f"{_LOSS}clip_ratio_{end}"] for end in ("low", "high"))
        clips = {"clip_low": low, "clip_high": high, "dual_clip": given[_ACTOR + "clip_ratio_c"]}
        result.put_class("model.loss", "PPOClip", **clips)
    else:
        arguments["base_advantage"] = result.config["model"]["init_args"]["advantage"]
    result.put_class("model.advantage", "Distillation", **arguments)
    _put_reward(given, result)
    if mode not in ("kl", "k1"):
        result.leave(given, _MODE, "Distillation's advantage is minus k1, not minus this estimate")
    if steps > 1:
        result.leave(given, _AS_REWARD)


def _penalty(given: Given, result: Conversion, mode: str, coef: float) -> None:
    """Take verl's estimate of the KL to the teacher, which is then the reference."""
    if mode in ("low_var_kl", "k3"):  # which verl takes at 10 at most
        cap = min(10.0, given[_LOSS + "loss_max_clamp"] or 10.0)
        result.put_class("model.kl", "K3Penalty", coef=coef, cap=cap)
    else:
        result.put_class("model.kl", "K2Penalty", coef=coef)
        if mode not in ("mse", "k2"):
            result.leave(given, _MODE, "K2Penalty is written, whose gradient is the reverse KL's")
    result.put_class("model.reference", "FrozenReference", model=_model(given, result))


def _divergence(given: Given, result: Conversion, mode: str, coef: float) -> None:
    """Take the divergence over the teacher's likeliest tokens as a loss."""
    beta = 1.0 if given[_AS_REWARD] else _BETAS.get(mode, 1.0)
    arguments: dict[str, Any] = {"beta": beta, "coef": coef}
    if teaches_alone(given):
        result.put_class("model.advantage", "Distillation")  # one that needs no rewards
    else:
        arguments["base_loss"] = result.config["model"]["init_args"]["loss"]
    result.put_class("model.loss", "TeacherDivergence", **arguments)
    _put_reward(given, result, top_k=given[_LOSS + "topk"])
    kind = "reverse" if beta else "forward"
    result.leave(
        given,
        _MODE,
        "verl sums over the teacher's likeliest tokens alone; here all others count as one more"
        if mode == "forward_kl_topk" and not given[_AS_REWARD]
        else f"TeacherDivergence is written: the {kind} KL over the teacher's likeliest tokens, "
        "whose gradient verl estimates from the written one",
    )


def _put_reward(given: Given, result: Conversion, **options: Any) -> None:
    """Append the teacher to the rewards, of which it is no part."""
    data = result.config["data"]["init_args"]
    dtype = given[_TEACHER + "inference.dtype"] or given.look(_ROLLOUT + "dtype")
    if given.look("actor_rollout_ref.model.trust_remote_code"):
        options["trust_remote_code"] = True
    path = _model(given, result)
    teacher = instance("lightning_rl.ModelTeacher", model=path, dtype=dtype, **options)
    if data["rewards"]:
        weights = data.get("reward_weights") or [1.0] * len(data["rewards"])
        result.put("data.reward_weights", [*weights, 0.0])
    result.put("data.rewards", [*data["rewards"], teacher])
    result.remarks.append(
        "ModelTeacher computes in the training process; verl's teacher has GPUs of its own, as a "
        "ServedTeacher can"
    )


def _model(given: Given, result: Conversion) -> str:
    path = given[_TEACHER + "model_path"]
    if path is None:
        result.missing.append("TEACHER: the teacher's directory or hub name")
    return str(path or "TEACHER")
