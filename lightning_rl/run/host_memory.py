"""Copies of tensors in host memory, as they are now."""

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_rl.run.processes.dist import fell_back


def in_host_memory(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint's tensors to the CPU as they are now; tied tensors stay tied."""
    copies: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = _place(tensor)
        if key not in copies:
            copies[key] = _host_copy(tensor.detach())
        return copies[key]

    copied: dict[str, Any] = apply_to_collection(checkpoint, Tensor, copy)
    if any(device == "cuda" for device, *_ in copies):
        torch.cuda.current_stream().synchronize()  # copies into pinned memory are not waited for
    return copied


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors that are the same view of the same memory."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    storage = tensor.untyped_storage()._cdata if plain else id(tensor)
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (tensor.device.type, storage, *view)


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    if tensor.device.type != "cuda":
        return tensor.cpu()
    try:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:  # the system allows no more of it
        fell_back("pinned host memory", str(error).splitlines()[0], "a blocking copy")
        return tensor.cpu()
    return host.copy_(tensor, non_blocking=True)
