"""What an optimizer keeps of the parameters that it steps, measured on small ones like them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

ELEMENTS = 1 << 16
"""Of a parameter that is stepped. Of fewer the state may be of another kind: bitsandbytes keeps 32
bits for parameters below 4,096."""


def state_bytes(
    make: Callable[[Any], Optimizer], shapes: Iterable[torch.Size], dtype: torch.dtype
) -> tuple[str, int]:
    """The name of an optimizer, and the bytes of the state that one step leaves.

    A parameter is cut to some of its rows. Its state grows with them in a line, which two lengths
    tell. Counts of steps, single numbers, are left out, and tables that parameters share.

    Args:
        make: called with parameters.
        shapes: of the parameters.
        dtype: of the parameters.
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
    """Bytes that an optimizer of torch has for itself while it steps parameters of some sizes.

    Its fused kernels have none. Where it steps all ``together``, which is its default for plain
    tensors on a GPU, it has one more of each ("foreach uses ~ sizeof(params) more peak memory", as
    torch's reference says of each); else two of one parameter, as the root of AdamW's second moment
    and its quotient are.

    Args:
        make: called with parameters.
        sizes: elements of each parameter.
        width: bytes of an element.
        together: whether it does so if it is not told to.
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
    """All rows of a small parameter; of a larger one two numbers of them."""
    rows = max(1, ELEMENTS // max(1, shape[1:].numel()))
    return [shape[0]] if shape[0] <= 2 * rows else [rows, 2 * rows]


def _own(state: dict[str, Any]) -> int:
    """Bytes of a parameter's state."""
    tables = ("qmap1", "qmap2")  # of bitsandbytes: one for all parameters on a device
    return sum(
        value.nbytes
        for name, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1 and name not in tables
    )
