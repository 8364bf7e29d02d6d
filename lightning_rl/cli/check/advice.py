"""Suggestions for settings that lower the memory of training."""

from dataclasses import dataclass

from lightning_rl.cli.check.placement import Placement
from lightning_rl.models.policy import Policy

SHARE = "share the weights: strategy ShardedStrategy with more devices, or its cpu_offload: true"
LESS_STATE = f"train with lora, or {SHARE}"
LONGER = "for long rollouts ShardedStrategy(sequence=2)"
LESS_ACTIVATIONS = (
    "lower update.max_tokens_per_micro_batch, or set loading.gradient_checkpointing: true; "
    f"{LONGER}"
)


@dataclass(frozen=True)
class Advice:
    """The next setting to enable for less ``state``, which is all that stays between updates, and
    for less ``activations``, which is everything else.
    """

    state: str
    activations: str


def next_advice(
    policy: Policy, states: float, kept: float, wide_state: bool, placement: Placement
) -> Advice:
    """Suggest settings that are not enabled yet, cheaper ones before those that need more devices.

    ``states`` are the bytes of activations at the peak, and ``kept`` those between both passes.
    ``wide_state``: the optimizer keeps more than 3 bytes per weight.
    """
    ways = ["train with lora"] if policy.lora is None else []
    if placement.shards * placement.tensor > 1:
        more = "more devices, or ShardedStrategy's cpu_offload: true"
        ways.append("more devices" if placement.cpu_offload else more)
    else:
        if wide_state:
            ways.append("set optimizer: bitsandbytes.optim.AdamW8bit")
        ways.append(SHARE)
    recompute, lower = policy.recompute, f"lower update.max_tokens_per_micro_batch; {LONGER}"
    if recompute is None:
        less = LESS_ACTIVATIONS
    elif recompute.inputs == "device" and (recompute.mlp_tokens or 2 * kept > states):
        less = f"set loading.gradient_checkpointing: {{inputs: host}}, or {lower}"
    elif recompute.mlp_tokens is None and states > kept:
        less = f"set loading.gradient_checkpointing.mlp_tokens: 4096, or {lower}"
    else:
        less = lower
    return Advice(", or ".join(ways), less)
