"""Pushes of adapters alone: the engine keeps the base, and merges the adapters into it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rl.engines.lora import is_adapter
from lightning_rl.errors import IncompleteWeightsError
from lightning_rl.run.digest import digest, digests
from lightning_rl.run.processes.dist import any_rank

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy


def unit_of(name: str) -> str:
    """Return the module within which engines fuse weights: q, k and v; gate and up; all experts."""
    return name.partition(".experts.")[0] if ".experts." in name else ".".join(name.split(".")[:-2])


def merge(name: str, weight: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
    """Return ``weight + lora_B @ lora_A``, computed in float32; ``weight`` if it has no adapter."""
    layer, _, leaf = name.rpartition(".")
    if leaf != "weight" or f"{layer}.lora_B" not in adapters:
        return weight
    a, b = (adapters[f"{layer}.lora_{x}"].to(weight.device).float() for x in "AB")
    return (weight.float() + b @ a).to(weight.dtype)


class Merger:
    """Merges pushed adapters into the base in an engine's worker, and passes on whole weights.

    Adapters come first and all together; the rest of the push is their base. The merger keeps, in
    host memory, every base module with an adapted weight, because engines load modules as a whole.
    A push without adapters passes through unchanged.

    Args:
        device: where to merge.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: dict[str, Tensor] = {}
        self._adapters: dict[str, Tensor] = {}
        self._units: set[str] = set()  # modules in which something is adapted
        self._came: set[str] = set()

    def begin(self) -> None:
        """Begin a push."""
        self._came.clear()

    def take(
        self, arrived: Iterable[tuple[str, Tensor]], with_base: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights to load; ``with_base``: adapters wait for the base that follows."""
        units = set()
        for name, tensor in arrived:
            if is_adapter(name):
                self._adapters[name] = tensor.to(self._device, copy=True)
                self._came.add(name)
                units.add(unit_of(name))
            elif unit_of(name) in self._units:
                self._base[name] = tensor.to("cpu", copy=True)
                yield name, merge(name, tensor, self._adapters)
            else:
                yield name, tensor
        self._units |= units
        if not with_base:
            for name, weight in self._base.items():
                if unit_of(name) in units:
                    yield name, merge(name, weight.to(self._device), self._adapters)

    def seen_apart(self, held: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
        """Turn digests of what an engine of this dtype holds into digests of what was pushed."""
        base = {name: weight.to(self._device) for name, weight in self._base.items()}
        return seen_apart(held, base, self._adapters, dtype) if base else dict(held)

    def finish(self) -> None:
        """End a push.

        Raises:
            IncompleteWeightsError: if the push did not bring an adapter, or the base of one is
                missing; names the first.
        """
        if missing := sorted(self._adapters.keys() - self._came):
            raise IncompleteWeightsError(
                f"the push lacks {len(missing)} adapters, the first is {missing[0]!r}"
            )
        layers = {name.rpartition(".")[0] for name in self._adapters}
        if missing := sorted(layers - {name.rpartition(".")[0] for name in self._base}):
            raise IncompleteWeightsError(
                f"the push brings adapters of {len(missing)} layers whose base weights the engine "
                f"lacks, the first is {missing[0]!r}"
            )


def weights_apart(policy: "Policy", owes_base: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters, and then their base if some engine does not have it yet.

    All ranks gather sharded weights together, including those that push nothing: so every rank has
    to exhaust this iterator, and says whether it owes its engine the base.
    """
    yield from policy.named_adapter_weights()
    if any_rank(owes_base):
        yield from policy.named_base_weights()


def merged(
    base: Mapping[str, Tensor], adapters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of ``base`` with adapters merged, for an engine in this process."""
    held = dict(adapters)
    for name, weight in base.items():
        yield name, merge(name, weight, held)


def seen_apart(
    held: Mapping[str, str],
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, str]:
    """Turn digests of merged weights in an engine into digests of base and adapters.

    Where merging base and adapters again gives what the engine holds, the base's digest is used.

    Args:
        held: digests of what the engine holds.
        base: the adapted weights; others may be among them.
        adapters: the adapters as they arrived, in float32.
        dtype: the engine's dtype.
    """
    result = dict(held) | digests((name, factor.float()) for name, factor in adapters.items())
    for name, weight in base.items():
        if (whole := merge(name, weight, adapters)) is not weight and name in held:
            same = digest(whole.to(dtype)) == held[name]
            result[name] = digest(weight.to(dtype)) if same else held[name]
    return result
