"""Offloads inputs of recomputed layers to host memory between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostInputs:
    """A checkpoint function that keeps its inputs in host memory.

    A layer's input is copied to the host while the layer computes, and fetched during the backward
    pass of the next layer. On CUDA a separate stream copies from and to pinned memory, so that at
    most two inputs are on the device at a time: one in use, and one being copied. On a CPU the
    copies are made too, at once.

    Args:
        checkpoint: calls a function and keeps only its arguments, as
            ``torch.utils.checkpoint.checkpoint`` does without re-entrance, through torch's hooks
            for saved tensors.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint
        self._last: ref[HostInput] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        # What is saved within the function is for the checkpoint's own hooks, which come after.
        with saved_tensors_hooks(self._send, _received):
            return self.checkpoint(function, *args)

    def _send(self, tensor: Tensor) -> Tensor | HostInput:
        if not tensor.is_floating_point():
            return tensor  # places of tokens, which a vision tower's layers share
        sent = HostInput(tensor, self._last)
        self._last = ref(sent)
        return sent


def _received(kept: Tensor | HostInput) -> Tensor:
    return kept.received() if isinstance(kept, HostInput) else kept


class HostInput:
    """A tensor that is copied to host memory, and back when it is needed.

    Args:
        tensor: on any device.
        before: the input offloaded before this one, to be needed after it. Any other order also
            works, but waits for copies.
    """

    def __init__(self, tensor: Tensor, before: ref[HostInput] | None) -> None:
        self.device = tensor.device
        self._before = before
        self._back: Tensor | None = None
        # The device's memory is given back by the stream that computes, and only once this one has
        # waited for the copy: then whatever comes to its place is computed later.
        self._leaving: Tensor | None = tensor
        if (last := self._previous()) is not None:
            last._leave()
        with _beside(self.device) as copied:
            self.host = host_memory(tensor)
            self.host.copy_(tensor, non_blocking=True)
        self._copied: Any = copied

    def received(self) -> Tensor:
        """Return the tensor on its device, and begin to fetch the one before it."""
        self._leave()
        self.fetch()
        self._wait()
        back, self._back = self._back, None
        assert back is not None
        if (last := self._previous()) is not None:
            last.fetch()
        return back

    def fetch(self) -> None:
        """Begin to copy the tensor to the device."""
        if self._back is not None:
            return
        # Of the stream that computes, to which it goes back, and which may still be using it.
        self._back = torch.empty_like(self.host, device=self.device)
        with _beside(self.device) as copied:
            self._back.copy_(self.host, non_blocking=True)
        self._copied = copied

    def _previous(self) -> HostInput | None:
        return None if self._before is None else self._before()

    def _leave(self) -> None:
        if self._leaving is not None:
            self._wait()
            self._leaving = None

    def _wait(self) -> None:
        """Make later computations on the device wait for the copy."""
        if self._copied is not None:
            self._copied.wait(torch.cuda.current_stream(self.device))

    def __del__(self) -> None:
        # A backward pass that failed leaves copies behind that are still being made.
        if self._back is not None:
            self._wait()


def host_memory(tensor: Tensor) -> Tensor:
    """Allocate host memory for a tensor; pinned if the tensor is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


class _Beside:
    """Makes copies in this block wait for everything that the device computes so far.

    It yields an event that completes with the copies; None without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _copying(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.block = torch.cuda.stream(self.stream)
        self.copied = torch.cuda.Event()

    def __enter__(self) -> Any:
        self.block.__enter__()
        return self.copied

    def __exit__(self, *raised: Any) -> None:
        self.copied.record(self.stream)
        self.block.__exit__(*raised)


def _beside(device: torch.device) -> Any:
    return _Beside(device) if device.type == "cuda" else nullcontext()


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies: with two, both directions would wait for each other."""
    return torch.cuda.Stream(device)
