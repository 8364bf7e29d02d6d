"""Pretend a device: its tensors say that they are on it, and compute on the CPU.

As on a GPU, they refuse to be mixed with the CPU's, but for numbers (0-dimensional tensors) in what
is computed element by element, and every wait of the host for the device is counted. What computes
are the CPU's own kernels, so a run on this device has the CPU's numbers, bit for bit.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.library import Library
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "pretended"
DEVICE = torch.device("cpu")  # until the backend has its name, below

waits: Counter[str] = Counter()
"""The number of waits for the device since this was cleared, by operator."""


class _Backend(_DummyBackendModule):
    """Stands for ``torch.pretended``."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        waits["synchronize"] += 1

    def current_stream(self, device: Any = None) -> "_Backend":
        return self  # so that a stream's synchronize() is counted too


_setup_privateuseone_for_python_backend(NAME, _Backend())
DEVICE = torch.device(NAME, 0)


class Pretended(Tensor):
    """Says that it is on the device; ``numbers`` holds them, on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> "Pretended":
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=DEVICE,
        )
        made.numbers = real
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{NAME} {self.numbers!r}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return self.numbers.untyped_storage()  # by which safetensors knows what is tied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers.__reduce_ex__(protocol)  # in a file it is like any other

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        numbers_may = torch.Tag.pointwise in func.tags or name in _FILLS
        flat = [x for arg in (*args, *kwargs.values()) for x in _tensors(arg)]
        mixed = any(type(x) is not Pretended and (x.ndim or not numbers_may) for x in flat)
        if mixed and name not in (*_COPIES, *_INDEXED):
            raise RuntimeError(f"{name}: expected all tensors on {DEVICE}, but some are on the CPU")
        in_place = func._schema.is_mutable
        leaves = torch.device(kwargs.get("device") or DEVICE).type != NAME
        leaves = leaves or (name == "copy_" and type(args[0]) is not Pretended)
        waits.update(_wait(name, args, kwargs, leaves, mixed))
        there = {key: _there(value) for key, value in kwargs.items()}
        if "device" in kwargs:
            there["device"] = torch.device("cpu")
        out = func(*map(_there, args), **there)
        if torch.Tag.inplace_view in func.tags:  # its size changes, and is kept by the wrapper too
            return return_and_correct_aliasing(func, args, kwargs, _here(out))
        if in_place:
            return kwargs.get("out", args[0])
        return out if leaves or name in _READS else _here(out)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [x for part in value for x in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _there(value: Any) -> Any:
    """Return the value that the CPU computes with."""
    if isinstance(value, list | tuple):
        return type(value)([_there(x) for x in value])
    return value.numbers if isinstance(value, Pretended) else value


def _here(value: Any) -> Any:
    """Wrap what the CPU has computed as if it were on the device."""
    if isinstance(value, list | tuple):
        return tuple(_here(x) for x in value)
    return Pretended(value) if isinstance(value, Tensor) else value


_COPIES = ("_to_copy", "copy_")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
_FILLS = ("fill", "fill_", "masked_fill", "masked_fill_", *_INDEXED)
_READS = ("_local_scalar_dense", "equal", "is_same_size")
# The host waits until it knows how large the results of these are.
_SIZED_BY_DATA = (
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
    "repeat_interleave",
)


def _wait(name: str, args: Any, kwargs: Any, leaves: bool, mixed: bool) -> list[str]:
    """Return the operator's name, if CUDA's host waits for it; else nothing."""
    if name in _COPIES:
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        crosses = leaves or mixed
        return [f"{name} to {'host' if leaves else 'device'}"] if crosses and blocking else []
    sized = name in _SIZED_BY_DATA and kwargs.get("output_size") is None
    indices = args[1] if name in _INDEXED and isinstance(args[1], list | tuple) else ()
    masks = any(i is not None and i.dtype == torch.bool for i in indices)
    return [name] if name in _READS or sized or masks or mixed else []


# All that is made on the device comes from these two, whichever factory was called.
_made_there = Library("aten", "IMPL")


def _empty(size: Any, *args: Any, **kwargs: Any) -> Tensor:
    return Pretended(torch.empty(size, dtype=kwargs.get("dtype")))


def _empty_strided(size: Any, stride: Any, *args: Any, **kwargs: Any) -> Tensor:
    return Pretended(torch.empty_strided(size, stride, dtype=kwargs.get("dtype")))


def _arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None, **_: Any) -> Tensor:
    start, end = (0, start) if end is None else (start, end)
    return Pretended(torch.arange(start, end, step, dtype=dtype))


for _arange_name in ("arange", "arange.start", "arange.start_step"):  # its size comes late
    _made_there.impl(_arange_name, _arange, "PrivateUse1")
_made_there.impl("empty.memory_format", _empty, "PrivateUse1")
_made_there.impl("empty_strided", _empty_strided, "PrivateUse1")


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy for ``torch.tensor``, which fills what it makes behind the back of all subclasses."""
    waits["torch.tensor"] += 1
    here, there = (x.numbers if isinstance(x, Pretended) else x for x in (source, target))
    there.copy_(here)
    return target


_made_there.impl("_copy_from", _copy_from, "PrivateUse1")


class _Attention(torch.autograd.Function):
    """Computes SDPA by the CPU's fused kernel; torch would take another for an unknown device."""

    @staticmethod
    def forward(
        ctx: Any, mask: Tensor | None, options: dict[str, Any], *inputs: Pretended
    ) -> Tensor:
        with torch.enable_grad():
            ctx.inputs = [x.numbers.detach().requires_grad_() for x in inputs]
            mask = mask.numbers if isinstance(mask, Pretended) else mask
            ctx.out = scaled_dot_product_attention(*ctx.inputs, mask, **options)
        return Pretended(ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Pretended) -> Any:
        found = torch.autograd.grad(ctx.out, ctx.inputs, gradient.numbers)
        return None, None, *map(Pretended, found)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *options: Any,
    **more: Any,
) -> Any:
    more |= dict(zip(("is_causal",), options, strict=False), dropout_p=dropout_p)
    return _Attention.apply(attn_mask, more, q, k, v)


def _silu_backward(gradient: Pretended, x: Pretended) -> Tensor:
    return Pretended(torch.ops.aten.silu_backward(gradient.numbers, x.numbers))


_made_there.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
_made_there.impl("silu_backward", _silu_backward, "AutogradPrivateUse1")  # for the same reason


def _in_16_bits(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator under autocast."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(key):
            wide = torch.float32, torch.float16, torch.bfloat16
            args, kwargs = tree_map_only(
                Tensor, lambda x: x.to(dtype) if x.dtype in wide else x, (args, kwargs)
            )
            return operator(*args, **kwargs)

    return run


_autocast = Library("_", "IMPL")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"):
    _operator = getattr(torch.ops.aten, _name).default
    _made_there.impl(_name, _in_16_bits(_operator), "AutocastPrivateUse1")


class PretendedAccelerator(Accelerator):
    """Lets a Trainer use the device: ``Trainer(accelerator=PretendedAccelerator())``."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [DEVICE]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


@contextmanager
def moving_in_place() -> Iterator[None]:
    """Let ``module.to(device)`` keep its parameters, so that what is tied stays so.

    Between CPU and GPU that is so anyway; these two sorts of tensors have to be asked for it.
    """
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def on_the_device(precision: str = "32-true") -> dict[str, Any]:
    """Return arguments of a Trainer that puts a module on the device."""
    options: dict[str, Any] = {
        "accelerator": PretendedAccelerator(),
        "strategy": SingleDeviceStrategy(DEVICE),
    }
    if precision.endswith("-mixed"):  # Lightning would take autocast's device to be a GPU
        return options | {"plugins": [MixedPrecision(precision, NAME)]}
    return options | {"precision": precision}
