"""LoRAs beside the weights: each line of a batch is computed by the adapters of its writer."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightning_rl.engines.base import Engine
from lightning_rl.engines.lora import layers_of
from lightning_rl.errors import WeightSyncError

Owners = tuple[tuple[int, int], ...]
"""Owners of a layer's columns, in order: a writer's number, and how many columns it has."""


class Adapters:
    """The adapters of a model's linear layers, and the writer of each line of the batch."""

    def __init__(self) -> None:
        self._layers: dict[str, _Layer] = {}
        self._numbers: dict[Engine, int] = {}
        self._lines: list[int] = []
        self._masks: dict[Owners, Tensor] = {}

    def put(self, lm: PreTrainedModel, writer: Engine, adapters: dict[str, Tensor]) -> None:
        """Copy a writer's adapters, in the place of those that it had.

        Raises:
            WeightSyncError: naming a layer that is not linear; then all stay as they were.
        """
        names, number = layers_of(adapters), self._numbers.setdefault(writer, len(self._numbers))
        for name in names:
            module = lm.get_submodule(name)
            if not isinstance(module, nn.Linear):
                raise WeightSyncError(
                    f"the engine cannot adapt layer {name!r} of type {type(module).__name__}; "
                    "leave it out of lora.target_modules, or merge the adapters: engine adapters: "
                    "merged, or MultiPolicyEngine"
                )
        for name, layer in self._layers.items():
            if name not in names:
                layer.put(number, None)
        for name in names:
            if name not in self._layers:
                self._layers[name] = _Layer(self, lm.get_submodule(name))
            factors = adapters[f"{name}.lora_A"], adapters[f"{name}.lora_B"]
            self._layers[name].put(number, factors)

    def held(self, writer: Engine) -> dict[str, Tensor]:
        """Return the factors used for a writer's lines, by the names of a push."""
        number = self._numbers.get(writer, -1)
        result = {}
        for name, layer in self._layers.items():
            if (factors := layer.factors_of(number)) is not None:
                result[f"{name}.lora_A"], result[f"{name}.lora_B"] = factors
        return result

    def begin(self, writers: Iterable[Engine]) -> None:
        """Begin a batch of N lines, given the writer of each."""
        lines = [self._numbers.get(writer, -1) for writer in writers]  # -1: by the base
        if lines != self._lines:
            self._lines = lines
            self._masks.clear()

    def mask(self, owners: Owners, like: Tensor) -> Tensor:
        """Return a mask (N, 1, K) of the columns that belong to each line's writer."""
        if owners not in self._masks:
            columns = [number for number, count in owners for _ in range(count)]
            own = torch.tensor(self._lines)[:, None, None] == torch.tensor(columns)
            self._masks[owners] = own.to(like)
        return self._masks[owners]


class _Layer:
    """The adapters of one linear layer: its output is ``y + ((x A^T) * mask) B^T``.

    A (K, in) and B (out, K) are those of all writers, one after the other.
    """

    def __init__(self, adapters: Adapters, linear: nn.Linear) -> None:
        self._adapters = adapters
        self._weight = linear.weight
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}
        linear.register_forward_hook(self._add)

    def put(self, writer: int, factors: tuple[Tensor, Tensor] | None) -> None:
        """Copy a writer's factors; None: it has none here."""
        if factors is None:
            self._factors.pop(writer, None)
        else:
            a, b = (factor.to(self._weight, copy=True) for factor in factors)
            self._factors[writer] = a, b  # in its place, so that the others' sums stay the same
        self._owners = tuple((number, len(a)) for number, (a, _) in self._factors.items())
        if self._factors:
            self._a = torch.cat([a for a, _ in self._factors.values()])
            self._b = torch.cat([b for _, b in self._factors.values()], dim=1)

    def factors_of(self, writer: int) -> tuple[Tensor, Tensor] | None:
        """Return a writer's factors; None if it has none here."""
        start = 0
        for number, count in self._owners:
            if number == writer:
                return self._a[start : start + count], self._b[:, start : start + count]
            start += count
        return None

    def _add(self, linear: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if self._owners:
            chosen = F.linear(inputs[0], self._a) * self._adapters.mask(self._owners, output)
            output.flatten(0, -2).addmm_(chosen.flatten(0, -2), self._b.T)
