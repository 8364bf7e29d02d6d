"""Labelled data sources, and the checks and spaces derived from their rows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.maker import built
from lightning_rl.envs.networks.space import Observed, Space
from lightning_rl.errors import DataError

LABEL = "label"


class LabelledData(ABC):
    """A source of observations with one label each; your own is a subclass with one method."""

    @property
    def name(self) -> str:
        """The name that error messages use for this source."""
        return type(self).__name__

    @abstractmethod
    def load(self) -> Mapping[str, Any]:
        """Return observations (N, *shape) by name and ``label``, as a TensorDict or mapping.

        Labels (N,) of integers are classes, counted from 0; floats (N,) or (N, D) are numbers.
        """


@configurable
class FunctionData(LabelledData):
    """Loads the data that a function returns.

    Args:
        make: the function's import path; it returns the same as ``LabelledData.load``.
        arguments: keyword arguments for it.

    Raises:
        ConfigError: on loading, if there is no such function, or if it raises.
    """

    def __init__(self, make: str, arguments: dict[str, Any] | None = None) -> None:
        self.make = make
        self.arguments = arguments or {}

    @property
    def name(self) -> str:
        return self.make

    def load(self) -> Mapping[str, Any]:
        rows: Mapping[str, Any] = built(self.make, self.arguments, "make")
        return rows


def rows_of(data: LabelledData) -> TensorDict:
    """Return all rows of a source as a TensorDict [N], with observations as bytes or float32.

    Raises:
        DataError: if the data are not as ``LabelledData.load`` specifies.
    """
    loaded = data.load()
    if not isinstance(loaded, Mapping | TensorDict):
        raise DataError(
            f"{data.name} returned a {type(loaded).__name__}; return a TensorDict of observations "
            f"by name and {LABEL!r}"
        )
    rows = {key: _tensor(data, key, value) for key, value in loaded.items()}
    if LABEL not in rows or len(rows) == 1:
        raise DataError(
            f"{data.name} returned {', '.join(rows) or 'nothing'}; return observations by name and "
            f"{LABEL!r}"
        )
    lengths = {key: len(value) for key, value in rows.items()}
    if len(set(lengths.values())) > 1 or not lengths[LABEL]:
        shown = ", ".join(f"{length} rows of {key}" for key, length in lengths.items())
        raise DataError(f"{data.name} returned {shown}; return at least one row, each with a label")
    return TensorDict(rows, [lengths[LABEL]])


def _tensor(data: LabelledData, key: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.ndim == 0:
        raise DataError(
            f"{data.name}: {key} is the single number {tensor.item()}; give one value per row"
        )
    if tensor.is_floating_point():
        bad = (~tensor.isfinite()).flatten(1).any(1) if tensor.ndim > 1 else ~tensor.isfinite()
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise DataError(f"{data.name}: {key} of row {row} is NaN or infinite; leave it out")
        return tensor.float()
    if key == LABEL:
        return tensor.long()
    return tensor if tensor.dtype == torch.uint8 else tensor.float()


def space_of(rows: TensorDict) -> Space:
    """Return the space that bodies are built for: the observations of rows, without actions."""
    seen = {key: value for key, value in rows.items() if key != LABEL}
    return Space({key: Observed(tuple(v.shape[1:]), v.dtype) for key, v in seen.items()}, {})
