"""Weights in buckets: cut so that no layer which an engine fuses is split."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Elements; a tensor starts at a multiple of it."""


def unit_of(name: str) -> str:
    """The module within which engines fuse weights: q, k and v; gate and up; all experts."""
    return name.partition(".experts.")[0] if ".experts." in name else ".".join(name.split(".")[:-2])


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights, and where each starts in a flat buffer of ``numel`` elements."""

    weights: list[tuple[str, Tensor]]
    starts: list[int]
    numel: int

    def copy_changed(self, flat: Tensor, everything: bool) -> list[tuple[str, list[int], int]]:
        """Write to ``flat``, casting, what differs from what it holds.

        Returns name, shape and first element of all weights in units that changed; ``everything``:
        of all.
        """
        changed: set[str] = set()
        for (name, weight), start in zip(self.weights, self.starts, strict=True):
            held = flat[start : start + weight.numel()].view(weight.shape)
            if everything or not torch.equal(held, weight.to(held)):
                held.copy_(weight)
                changed.add(unit_of(name))
        return [entry for entry in self.entries() if unit_of(entry[0]) in changed]

    def entries(self) -> list[tuple[str, list[int], int]]:
        """Name, shape and first element of all weights."""
        return [
            (name, list(weight.shape), start)
            for (name, weight), start in zip(self.weights, self.starts, strict=True)
        ]


def cut(weights: Iterable[tuple[str, Tensor]], max_numel: int) -> Iterator[Bucket]:
    """Buckets of at most ``max_numel`` elements, or of one unit where that is larger."""
    bucket = Bucket([], [], 0)
    for unit in _units(weights):
        if bucket.weights and bucket.numel + unit.numel > max_numel:
            yield bucket
            bucket = Bucket([], [], 0)
        bucket = Bucket(
            bucket.weights + unit.weights,
            bucket.starts + [bucket.numel + start for start in unit.starts],
            bucket.numel + unit.numel,
        )
    if bucket.weights:
        yield bucket


def _units(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    current: list[tuple[str, Tensor]] = []
    for name, weight in weights:
        if current and unit_of(name) != unit_of(current[0][0]):
            yield _lay_out(current)
            current = []
        current.append((name, weight))
    if current:
        yield _lay_out(current)


def _lay_out(weights: list[tuple[str, Tensor]]) -> Bucket:
    starts, end = [], 0
    for _, weight in weights:
        starts.append(end)
        end += -(-weight.numel() // _ALIGNMENT) * _ALIGNMENT
    return Bucket(weights, starts, end)
