"""verl's ``rollout_correction``: importance weights for off-policy tokens, and rejection."""

from typing import Any

from lightning_rl.convert.conversion import Conversion, Given

CORRECTION = "algorithm.rollout_correction."
_IS = CORRECTION + "rollout_is"
TRUNCATED = "reinforce with truncated weights"
_MASKS = {"token_k1": "TokenMIS", "seq_sum_k1": "SequenceMIS", "seq_mean_k1": "GeometricMIS"}
_LEVELS = {"TokenMIS": "token", "SequenceMIS": "sequence"}


def carry_correction(given: Given, result: Conversion) -> str | None:
    """Set the correction; return the loss that replaces the configured one, if any."""
    if given[CORRECTION + "bypass_mode"]:
        return _bypassed(given, result)
    truncated, rejected = result.choose(given, _IS), given[CORRECTION + "rollout_rs"]
    several = "," in str(given.look(CORRECTION + "rollout_rs_threshold"))
    if rejected is not None and (rejected not in _MASKS or several):
        result.leave(given, CORRECTION + "rollout_rs")
        rejected = None
    if rejected is not None:
        _rejection(given, result, truncated, rejected)
    elif truncated is not None and given[CORRECTION + "rollout_is_threshold"] is not None:
        _truncation(given, result, truncated)
    return None


def _bypassed(given: Given, result: Conversion) -> str:
    """Use the engine's logprobs as the old ones, so that PPO's own ratio is already the weight."""
    result.put("model.update.use_rollout_logprobs", True)
    key = _IS
    weighs, mode = result.choose(given, key), "actor_rollout_ref.actor.policy_loss.loss_mode"
    if given.says(mode) and given[mode] != "vanilla":
        result.remarks.append(
            f"{mode} {given[mode]}: has no effect with bypass_mode, which has its own loss"
        )
    if given[CORRECTION + "rollout_rs"] is not None:
        result.leave(
            given,
            CORRECTION + "rollout_rs",
            "with bypass_mode verl rejects by the current policy at each step; nothing is rejected "
            "here",
        )
    if given[CORRECTION + "loss_type"] != "reinforce":
        if weighs is not None:
            result.remarks.append(
                f"{key}: has no effect with bypass_mode, whose ratio to the engine is the weight"
            )
        return "vanilla"
    threshold = given[CORRECTION + "rollout_is_threshold"]
    low, high = (None, 0.0) if threshold is None else bounds(threshold)
    if weighs == "token" and low is None and high > 1:
        return TRUNCATED
    if weighs is not None and threshold is not None:
        result.leave(given, key, "Reinforce without weights is written")
    return "gpg"


def _truncation(given: Given, result: Conversion, level: str) -> None:
    name = "Sequence" if level == "sequence" else "Token"
    key = CORRECTION + "rollout_is_threshold"
    low, high = bounds(given[key])
    if high <= 1 or (low or 0.0) >= 1:
        result.leave(given, key, "it must include a weight of 1; no correction is written")
    elif low is None:
        result.put_class("model.correction", f"{name}TIS", cap=high)
    else:  # two bounds: what is outside weighs nothing
        result.put_class("model.correction", f"{name}MIS", low=low, high=high)


def _rejection(given: Given, result: Conversion, truncated: str | None, rejected: str) -> None:
    """Convert verl's bounds, which are on 1 / w: k1 is log p_engine - log p_old."""
    key = CORRECTION + "rollout_rs_threshold"
    threshold = given[key]
    low, high = (None, 2.0) if threshold is None else bounds(threshold)
    if threshold is None:
        result.missing.append(f"{key}: verl has no default; 2 is written")
    low = 1 / high if low is None else low
    if not low < 1 < high:
        result.leave(given, key, "it must include a weight of 1; no correction is written")
        return
    name, arguments = _MASKS[rejected], {"low": 1 / high, "high": 1 / low}
    cap = given[CORRECTION + "rollout_is_threshold"] if truncated is not None else None
    weighted = truncated is not None and cap is not None
    result.put_class("model.correction", name, **arguments, weighted=weighted)
    if weighted and (_LEVELS.get(name) != truncated or _cuts(cap, arguments)):
        result.leave(
            given,
            CORRECTION + "rollout_is",
            f"there is one correction: what {name} keeps weighs what {name} compares, without the "
            "bound of rollout_is_threshold",
        )
    if counted := _still_counted(given, name):
        result.leave(
            given,
            CORRECTION + "rollout_rs",
            f"rejected tokens leave {', '.join(counted)} in verl; here they weigh 0 in the loss "
            "alone, and count where it is averaged: the gradient is smaller by the share kept",
        )


def _cuts(cap: Any, kept: dict[str, float]) -> bool:
    """Return True if verl's bound on weights is narrower than the range that is kept."""
    low, high = bounds(cap)
    return high < kept["high"] or (low or 0.0) > kept["low"]


def _still_counted(given: Given, name: str) -> list[str]:
    """List what a rejected token counts towards here, but not in verl."""
    actor = "actor_rollout_ref.actor."
    averaged = given.look(actor + "loss_agg_mode")
    estimator = str(given.look("algorithm.adv_estimator"))
    of_a_sequence = averaged == "seq-mean-token-mean" and name == "TokenMIS"
    counted = {
        "the number of tokens that the loss is averaged over": averaged == "token-mean",
        "the number of tokens that a sequence's mean is over": of_a_sequence,
        "the statistics of advantages": estimator.startswith(("gae", "reinforce_plus_plus")),
        "entropy in the loss": bool(given.look(actor + "entropy_coeff")),
        "KL in the loss": given.look(actor + "use_kl_loss"),
    }
    return [kind for kind, counts in counted.items() if counts]


def bounds(threshold: str | float) -> tuple[float | None, float]:
    """Return the lower and upper bound of ``low_high``; a single number is the upper one."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)
