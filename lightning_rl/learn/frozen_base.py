"""The frozen base of a LoRA: left out of checkpoints, and restored from the model's files."""

from hashlib import blake2b
from typing import Any

from torch import Tensor, nn

from lightning_rl.errors import ConfigError
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.models.policy import Policy
from lightning_rl.models.reward_model import RewardModel
from lightning_rl.run.digest import digests

_KEY = "frozen_base"
"""Checkpoint key of the digests of the base's weights, which were left out, by name.

Earlier checkpoints have a single digest of them all.
"""


def leave_out_base(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Remove from a checkpoint the weights that every start reads from the model's files."""
    if any(policy.sharded for policy in adapted(module).values()):
        return  # each rank writes, and reads, its own part
    base = _base_of(module)
    skipped = base.keys() & checkpoint.get("state_dict", {}).keys()  # none on other ranks
    if skipped:
        checkpoint["state_dict"] = {
            name: weight for name, weight in checkpoint["state_dict"].items() if name not in skipped
        }
        checkpoint[_KEY] = _digests(base)


def put_back_base(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Add the weights that were left out back to a checkpoint, from the module, which read the
    files.

    Raises:
        ConfigError: if the module's base has other weights than the checkpoint's run had.
    """
    base = _base_of(module) if _KEY in checkpoint else {}
    if not base:
        return
    found, kept = _digests(base), checkpoint[_KEY]
    if found != kept and _digest_of_all(found) != kept:
        named = sorted({policy.model for policy in adapted(module).values()})
        raise ConfigError(
            f"model={', '.join(map(repr, named))} has other weights than those that the "
            "checkpoint's LoRA was trained on, which the checkpoint does not contain; use the "
            "original model"
        )
    if "state_dict" in checkpoint:  # else a strategy has read it already, into its shards
        checkpoint["state_dict"] = base | checkpoint["state_dict"]


def adapted(module: nn.Module) -> dict[str, Policy | RewardModel]:
    """Return the policies that train a LoRA on weights from files, by their places in the module.

    A policy that is not trained is a reference, which may have been updated, so it is saved as a
    whole. So is a quantised base, which is small, and which other kernels may pack differently.
    """
    return {
        name: policy
        for name, policy in module.named_modules()
        if isinstance(policy, Policy | RewardModel)
        and policy.lora is not None
        and policy.lora.quantization is None
        and not policy.loading.random_init
        and any(parameter.requires_grad for parameter in policy.lm.parameters())
    }


def left_out(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that stay as in the models' files, by their names in ``state_dict``.

    Checkpoints leave them out, unless each rank writes its own part.
    """
    return {
        ".".join(filter(None, (place, "lm", name))): parameter
        for place, policy in adapted(module).items()
        for name, parameter in policy.lm.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and ".lora_" not in name
    }


def _base_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(weight.detach()) for name, weight in left_out(module).items()}


def _digests(base: dict[str, Tensor]) -> dict[str, str]:
    """Return digests of a base; the same whether it is in float32 or bfloat16."""
    return digests(
        (name, weight.bfloat16() if weight.is_floating_point() else weight)
        for name, weight in base.items()
    )


def _digest_of_all(found: dict[str, str]) -> str:
    return blake2b(repr(sorted(found.items())).encode(), digest_size=16).hexdigest()
