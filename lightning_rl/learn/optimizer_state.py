"""Measures an optimizer's state per parameter, on small parameters like those it steps."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

ELEMENTS = 1 << 16
"""Elements of a parameter that is stepped in a measurement. With fewer the state may be of another
kind: bitsandbytes keeps 32 bits for parameters below 4,096.
"""


def state_bytes(
    make: Callable[[Any], Optimizer], shapes: Iterable[torch.Size], dtype: torch.dtype
) -> tuple[str, int]:
    """Return the name of an optimizer, and the bytes of state that one step leaves.

    Each parameter is cut to a few of its rows. State grows linearly in rows, so two lengths suffice
    to extrapolate. Single numbers (step counts) and tables shared by parameters are left out.

    Args:
        make: creates the optimizer from parameters.
        shapes: shapes of the parameters.
        dtype: dtype of the parameters.
    """
    counted = [shape or torch.Size([1]) for shape in shapes]
    lengths = {shape: _rows(shape) for shape in counted}
    stepped = {
        (shape, rows): Parameter(torch.zeros(rows, *shape[1:], dtype=dtype, device="cpu"))
        for shape, of_shape in lengths.items()
        for rows in of_shape
    }
    optimizer = make(list(stepped.values()) or [Parameter(torch.zeros(1, 1, device="cpu"))])
    for parameter in stepped.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = {key: _own(optimizer.state[parameter]) for key, parameter in stepped.items()}

    def of_one(shape: torch.Size) -> int:
        *shorter, longest = lengths[shape]
        size = kept[shape, longest]
        if not shorter:
            return size
        per_row = (size - kept[shape, shorter[0]]) / (longest - shorter[0])
        return round(size + per_row * (shape[0] - longest))

    return type(optimizer).__name__, sum(map(of_one, counted))


def step_bytes(
    make: Callable[[Any], Optimizer], sizes: Iterable[int], width: int, together: bool
) -> int:
    """Return the bytes of temporary memory of a torch optimizer's step, for parameters of some
    sizes.

    Its fused kernels need none. If it steps all parameters ``together``, its default for plain
    tensors on a GPU, it needs another copy of each ("foreach uses ~ sizeof(params) more peak
    memory", in the words of torch's reference); otherwise two copies of one parameter, such as the
    root of AdamW's second moment and its quotient.

    Args:
        make: creates the optimizer from parameters.
        sizes: elements of each parameter.
        width: bytes per element.
        together: its default for ``foreach``.
    """
    settings = make([Parameter(torch.zeros(1, 1, device="cpu"))]).defaults
    if "foreach" not in settings or settings.get("fused"):
        return 0
    foreach = settings["foreach"]
    counts = list(sizes)
    if together if foreach is None else foreach:
        return width * sum(counts)
    return 2 * width * max(counts, default=0)


def _rows(shape: torch.Size) -> list[int]:
    """Return all rows of a small parameter; two numbers of rows of a larger one."""
    rows = max(1, ELEMENTS // max(1, shape[1:].numel()))
    return [shape[0]] if shape[0] <= 2 * rows else [rows, 2 * rows]


def _own(state: dict[str, Any]) -> int:
    """Return the bytes of a parameter's state."""
    tables = ("qmap1", "qmap2")  # of bitsandbytes: one for all parameters on a device
    return sum(
        value.nbytes
        for name, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1 and name not in tables
    )
