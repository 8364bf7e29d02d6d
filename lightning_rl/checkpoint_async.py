"""Checkpoints that are written in the background, from a copy in host memory."""

from typing import Any

import torch
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_rl.fallbacks import fell_back


class BackgroundCheckpointIO(AsyncCheckpointIO):
    """Lightning's, but that a checkpoint waits in host memory, not on the device.

    A copy of weights and optimizer on a GPU would need three times the weights' memory there while
    training goes on. Training waits for the copy; serialising, checksum and writing happen in the
    writer's thread.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if self._error:  # of a save before this one
            raise self._error
        self._ensure_setup()
        assert self._executor is not None
        self._executor.submit(self._write, in_host_memory(checkpoint), path, storage_options)

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        assert self.checkpoint_io is not None
        try:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        except BaseException as error:  # raised by the next save, or when the run ends
            self._error = error


def in_host_memory(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy with its tensors on the CPU, as they are now; what is tied stays one tensor."""
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
    """Equal for two tensors that are one memory, seen in one way."""
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
        fell_back("pinned host memory", str(error).splitlines()[0], "a copy that is waited for")
        return tensor.cpu()
    return host.copy_(tensor, non_blocking=True)
