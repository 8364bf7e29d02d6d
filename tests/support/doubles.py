"""Compute in float64, in which rounding is nothing beside any fault."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.overrides import TorchFunctionMode

EXACT = 1e-12
"""How far, relatively, two float64 results of the tests' tiny models may be apart that are one
number: more than ten times what is measured, and a ten-thousandth of what float32 would make."""

PRODUCTS = (Tensor.__matmul__, Tensor.matmul)
"""The functions behind ``@``, for buffers of older releases of transformers and of newer ones."""


class Doubled(TorchFunctionMode):
    """Keeps what is computed from float64 numbers in float64, in the thread that enters it.

    Norms, positions and softmax ask for float32 in transformers, whatever dtype the weights have.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args):
            args, named = map(wide, args), {name: wide(value) for name, value in named.items()}
            if function is Tensor.float:
                function = Tensor.double
            elif function in PRODUCTS:  # of frequencies by positions, which were integers
                args = (x.double() for x in args)
        return function(*args, **named)


def wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def doubled(batch: TensorDict) -> TensorDict:
    return batch.apply(lambda x: x.double() if x.is_floating_point() else x)


@pytest.fixture
def in_double() -> Iterator[None]:
    """Compute the test in float64."""
    with Doubled():
        yield
