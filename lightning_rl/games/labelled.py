"""Labelled data: what an agent may see, and what to make of it."""

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
    """Observations and a label of each; a source of one's own is a subclass with one method."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @abstractmethod
    def load(self) -> Mapping[str, Any]:
        """A TensorDict, or mapping, of observations (N, *shape) by name and of ``label``.

        Labels (N,) of integers are classes, counted from 0; (N,) or (N, D) of floats are numbers.
        """


@configurable
class FunctionData(LabelledData):
    """What a function returns.

    Args:
        make: its import path; it returns what ``LabelledData.load`` does.
        arguments: of it.

    Raises:
        ConfigError: when it is loaded, if there is no such function, or it raises.
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
    """All its rows [N], observations as bytes or float32.

    Raises:
        DataError: for what is not as ``LabelledData.load`` says.
    """
    loaded = data.load()
    if not isinstance(loaded, Mapping | TensorDict):
        raise DataError(
            f"{data.name} gives {type(loaded).__name__}; give a TensorDict of observations by name "
            f"and {LABEL!r}"
        )
    rows = {key: _tensor(data, key, value) for key, value in loaded.items()}
    if LABEL not in rows or len(rows) == 1:
        raise DataError(
            f"{data.name} gives {', '.join(rows) or 'nothing'}; give observations by name and "
            f"{LABEL!r}"
        )
    lengths = {key: len(value) for key, value in rows.items()}
    if len(set(lengths.values())) > 1 or not lengths[LABEL]:
        shown = ", ".join(f"{length} of {key}" for key, length in lengths.items())
        raise DataError(f"{data.name} gives {shown}; give a label for each row, and some rows")
    return TensorDict(rows, [lengths[LABEL]])


def _tensor(data: LabelledData, key: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.ndim == 0:
        raise DataError(f"{data.name}: {key} is the number {tensor.item()}; give one for each row")
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
    """What bodies are built for: the observations of rows, and no action."""
    seen = {key: value for key, value in rows.items() if key != LABEL}
    return Space({key: Observed(tuple(v.shape[1:]), v.dtype) for key, v in seen.items()}, {})
