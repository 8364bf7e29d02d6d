"""Convert TRL's AsyncGRPOConfig: what it has beside, or otherwise than, a GRPOConfig."""

from typing import Any

from lightning_rl.convert.conversion import Conversion, Given, instance

NAME = "asyncgrpo"
"""The name of its trainer."""
DEFAULTS: dict[str, Any] = {
    "max_completion_length": 2048,
    "lr_scheduler_type": "constant",
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_base_url": "http://localhost:8000",
}
"""Where it has other defaults than a GRPOConfig, or no choice."""
TELLING = {
    "max_staleness",
    "max_inflight_tasks",
    "queue_maxsize",
    "weight_sync_steps",
    "weight_sync_timeout",
    "heartbeat_stale_after_s",
    "fork_threshold_tokens",
    "request_timeout",
    "token_budget",
}
"""Names that only this configuration has."""


def carry(given: Given, result: Conversion) -> None:
    """Set the loss, whose ratio is to the engine's probabilities, and how far ahead it is written.

    The loss is PPO's, with advantages in units of their group's deviation.
    """
    low, high = given["epsilon"], given["epsilon_high"]
    result.put_class("model.loss", "PPOClip", clip_low=low, clip_high=low if high is None else high)
    result.put_class("model.aggregation", "TokenMean")
    result.put_class("model.advantage", "GRPO", normalize_std=True, eps=1e-8)
    result.put("model.update.use_rollout_logprobs", True)
    result.remarks.append(
        "AsyncGRPOTrainer divides a group's variance by n, and GRPO here by n - 1, so that "
        "advantages are smaller by the factor sqrt((n - 1) / n)"
    )
    if (steps := given.look("gradient_accumulation_steps")) > 1:
        result.remarks.append(
            f"gradient_accumulation_steps {steps}: a step is one mean over its tokens here, in TRL "
            "the mean of the micro-batches' means"
        )
    ahead: dict[str, Any] = {"max_staleness": given["max_staleness"], "abort_stale": True}
    if given.look("max_inflight_tasks") > 0:
        most = given["max_inflight_tasks"] // given.look("num_generations")
        ahead["max_groups_in_flight"] = max(1, most)
    result.put_class("data.collector", "AsyncCollector", **ahead)
    if (given.look("token_budget") or 0) > 0:
        result.put("model.update.max_tokens_per_micro_batch", given["token_budget"])


def weight_sync(given: Given) -> dict[str, Any]:
    """Return the callback that pushes weights, as often as they say."""
    steps = given["weight_sync_steps"]
    schedule = instance("FixedSchedule", every_n_iterations=steps)
    return instance("WeightSync", **({"schedule": schedule} if steps > 1 else {}))
