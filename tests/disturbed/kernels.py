"""CPU kernels whose results are off by a unit in the last place, where another order may be.

A product or a sum is what some order of adding gives. Another CPU has another order, as has the
same one for another shape: that is what is played here. What every CPU computes alike stays as it
is, and so do promises of equal bits. The unit is a function of the seed, the operation, its shapes
and the place in the result, so the same computation gives the same bits, in any process.

Left alone are

* sums of one term or two, and products over one: no other order exists;
* sums of few binary digits, such as counts, masks and rewards of 0.25, which no order rounds; and
  of all results those of few binary digits, be they zero, one, infinite, or a mask's -3.4e38;
* what acts on single elements (``exp``, a product with a number).

Of a 16-bit result few elements are changed, since its sums are taken in float32 in any order, and
only what lies between two of its numbers is rounded otherwise.
"""

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

PRODUCTS = {
    # What is multiplied: the arguments of which the first's last dimension is summed over.
    "mm": 0, "mm.out": 0, "bmm": 0, "bmm.out": 0, "dot": 0, "vdot": 0,
    "addmm": 1, "addmm.out": 1, "addmm_": 1, "_addmm_activation": 1,
    "baddbmm": 1, "baddbmm.out": 1, "baddbmm_": 1, "addbmm": 1, "addbmm_": 1,
    "addmv": 1, "addmv.out": 1, "addmv_": 1,
}  # fmt: skip
SUMS = (
    "sum.dim_IntList", "sum.IntList_out", "nansum", "prod", "prod.dim_int", "linalg_vector_norm",
    "linalg_vector_norm.out", "var.correction", "var_mean.correction", "std.correction",
    "std_mean.correction", "norm.ScalarOpt_dim", "mse_loss", "huber_loss", "smooth_l1_loss",
    "nll_loss_forward", "trace",
)  # fmt: skip
RUNNING = ("cumsum", "cumsum.out", "cumsum_", "_logcumsumexp")
ADDED = ("index_add", "index_add.out", "index_add_", "scatter_add", "scatter_add_")
WHOLE = (
    "_softmax", "_softmax.out", "_softmax_backward_data", "_softmax_backward_data.out",
    "_log_softmax", "_log_softmax.out", "_log_softmax_backward_data",
    "_log_softmax_backward_data.out", "logsumexp", "embedding_dense_backward",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "convolution",
    "convolution_backward", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
VLLM = {
    # The arguments that hold results, by vLLM's names of its kernels for CPUs.
    "onednn_mm": (0,), "rms_norm": (0,), "fused_add_rms_norm": (0,), "bmm_cpu": (0,),
    "cpu_attention_with_kv_cache": (3,),
}  # fmt: skip

FEW_DIGITS = 1024.0
"""Multiples of 1 over this are left alone, which leaves out all beyond 2^14 in float32."""
SPARSE = 32
"""Of 16-bit results one in so many is changed."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
PERIOD = 2**18
"""Units are drawn once, and read from a place of each computation's own."""


class Units:
    """-1, 0 and 1, or ``size`` times that, by the bytes of a number that they are added to."""

    def __init__(self, seed: int, size: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(-1, 2, (PERIOD,), generator=generator) * size
        rare = torch.randint(0, SPARSE, (PERIOD,), generator=generator) == 0
        self.seed = seed
        self._drawn = {size: drawn.to(bits) for size, bits in BITS.items()}
        self._drawn[2] = (drawn.sign() * rare).to(torch.int16)
        self._begins: dict[Any, int] = {}

    def of(self, name: str, shapes: tuple[torch.Size, ...], result: Tensor) -> Tensor:
        """As ``result``, for an operation on inputs of these shapes."""
        key = name, shapes
        if key not in self._begins:
            self._begins[key] = zlib.crc32(f"{self.seed} {name} {shapes}".encode()) % (PERIOD // 2)
        begin, count = self._begins[key], result.numel()
        units = self._drawn[result.element_size()][begin:]
        while len(units) < count:
            units = torch.cat([units, units])
        return units[:count].view(result.shape)


def nudge(units: Units, name: str, inputs: Any, result: Any, where: Tensor | None = None) -> None:
    """Move the elements of a result, all or those ``where``, by a unit or none."""
    if not isinstance(result, Tensor):
        for part in result or ():  # None: a gradient that nobody asked for
            nudge(units, name, inputs, part, where)
        return
    if not result.is_floating_point() or not result.numel() or result.element_size() not in BITS:
        return
    shapes = tuple(x.shape for x in inputs if isinstance(x, Tensor))
    rounded = _has_many_digits(result)
    if where is not None:
        rounded &= where
    bits = result.view(BITS[result.element_size()])
    bits.add_(units.of(name, shapes, result) * rounded)


def _has_many_digits(x: Tensor) -> Tensor:
    # Numbers of 16 bits have few digits all of them; those that are integers may well be exact.
    scaled = x * FEW_DIGITS if x.element_size() > 2 else x
    return scaled.frac().abs() > 0  # which is false of nan


def _exact(terms: Tensor, count: int) -> bool:
    """Whether no order of adding so many of these rounds."""
    digits = 24 if terms.dtype == torch.float32 else 53 if terms.dtype == torch.float64 else 8
    if count <= 2:
        return True
    largest = 2.0**digits / FEW_DIGITS
    with torch.no_grad():
        return bool((~_has_many_digits(terms) & (terms.abs() * count < largest)).all())


def after_product(units: Units, name: str, first: int, inputs: Any, result: Any) -> None:
    if inputs[first].shape[-1] > 1:
        nudge(units, name, inputs, result)


def after_sum(units: Units, name: str, inputs: Any, result: Any) -> None:
    terms = inputs[0]
    out = result if isinstance(result, Tensor) else result[0]
    if not out.is_floating_point() or not out.numel():
        return
    if not _exact(terms.to(out.dtype), terms.numel() // out.numel()):
        nudge(units, name, inputs, result)


def after_running(units: Units, name: str, inputs: Any, result: Tensor) -> None:
    dim = inputs[1]
    if not result.is_floating_point() or result.dim() == 0 or result.shape[dim] <= 2:
        return
    if _exact(result, result.shape[dim]):
        return
    nudge(units, name, inputs, result, _along(result, dim, torch.arange(result.shape[dim]) >= 2))


def after_adding(units: Units, name: str, inputs: Any, result: Tensor) -> None:
    """Of ``index_add`` and ``scatter_add``: where three terms or more came together."""
    dim, index, terms = inputs[1:4]
    if not result.is_floating_point() or not terms.numel() or _exact(terms, terms.numel()):
        return
    if name.startswith("index"):
        counts = _along(result, dim, index.flatten().bincount(minlength=result.shape[dim]))
    else:
        counts = torch.zeros(result.shape, dtype=torch.long)
        counts.scatter_add_(dim, index, torch.ones_like(index))
    nudge(units, name, inputs, result, counts > 2)


def _along(result: Tensor, dim: int, values: Tensor) -> Tensor:
    """Values (n,) of a dimension, to broadcast with the result."""
    return (
        values.view(-1, *[1] * (result.dim() - 1 - dim % result.dim())) if result.dim() else values
    )


@contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """Disturb PyTorch's kernels in the block, in all threads of the process."""
    library = disturb(seed)
    yield
    library._destroy()


def disturb(seed: int, size: int = 1) -> torch.library.Library:
    """Disturb PyTorch's kernels from now on, as long as what is returned lives."""
    units = Units(seed, size)
    after: dict[str, Callable[..., None]] = {
        **{name: partial(after_product, units, name, place) for name, place in PRODUCTS.items()},
        **{name: partial(after_sum, units, name) for name in SUMS},
        **{name: partial(after_running, units, name) for name in RUNNING},
        **{name: partial(after_adding, units, name) for name in ADDED},
        **{name: partial(nudge, units, name) for name in WHOLE},
    }
    return _replace("aten", after)


def disturb_vllm(seed: int, size: int = 1) -> torch.library.Library:
    """The same for the kernels that vLLM brings for CPUs, which write into their arguments."""
    units = Units(seed, size)

    def after(name: str, places: tuple[int, ...], inputs: Any, _: Any) -> None:
        nudge(units, name, inputs, [inputs[place] for place in places])

    # Each instruction set has a build of its own, and not all have all kernels.
    known = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()}
    built = {name: places for name, places in VLLM.items() if name in known}
    return _replace("_C", {name: partial(after, name, places) for name, places in built.items()})


def _replace(namespace: str, after: dict[str, Callable[..., None]]) -> torch.library.Library:
    """Let operations go on to what comes after them, with their arguments and result."""
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden
        for name, then in after.items():
            full = f"{namespace}::{name}"
            if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, "CPU"):
                continue
            kernel = torch.library.get_kernel(full, "CPU")
            library.impl(name, partial(_call, kernel, then), "CPU", with_keyset=True)
    return library


def _call(kernel: Any, then: Callable[..., None], keys: Any, *inputs: Any, **named: Any) -> Any:
    result = kernel.call_boxed(keys, *inputs, **named)
    then(inputs, result)
    return result
