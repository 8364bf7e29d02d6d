"""Adapters that go alone: an engine keeps the base, and merges into it what comes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rl.engines.lora import is_adapter
from lightning_rl.errors import IncompleteWeightsError
from lightning_rl.run.digest import digest, digests
from lightning_rl.run.dist import any_rank

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy


def unit_of(name: str) -> str:
    """The module within which engines fuse weights: q, k and v; gate and up; all experts."""
    return name.partition(".experts.")[0] if ".experts." in name else ".".join(name.split(".")[:-2])


def merge(name: str, weight: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
    """``weight + lora_B @ lora_A``, computed in float32; ``weight`` if it is not adapted."""
    layer, _, leaf = name.rpartition(".")
    if leaf != "weight" or f"{layer}.lora_B" not in adapters:
        return weight
    a, b = (adapters[f"{layer}.lora_{x}"].to(weight.device).float() for x in "AB")
    return (weight.float() + b @ a).to(weight.dtype)


class Merger:
    """Where weights arrive, in an engine's worker: makes whole weights of adapters.

    Adapters come first and all together; whatever comes after them in the same push is their base.
    Of that it keeps, in the memory of the host, all modules in which something is adapted, for
    engines load a module as a whole. A push without adapters passes through.

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
        """A push begins."""
        self._came.clear()

    def take(
        self, arrived: Iterable[tuple[str, Tensor]], with_base: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """What to load of what arrived; ``with_base``: adapters wait for their base to follow."""
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
        """Digests of what an engine of this dtype holds, as those of what came."""
        base = {name: weight.to(self._device) for name, weight in self._base.items()}
        return seen_apart(held, base, self._adapters, dtype) if base else dict(held)

    def finish(self) -> None:
        """A push ends.

        Raises:
            IncompleteWeightsError: naming an adapter that it left as it was, or whose base is not
                there.
        """
        if missing := sorted(self._adapters.keys() - self._came):
            raise IncompleteWeightsError(
                f"the push left {len(missing)} adapters as they were, first {missing[0]!r}"
            )
        layers = {name.rpartition(".")[0] for name in self._adapters}
        if missing := sorted(layers - {name.rpartition(".")[0] for name in self._base}):
            raise IncompleteWeightsError(
                f"the push brings adapters of {len(missing)} layers whose weights the engine has "
                f"not, first {missing[0]!r}"
            )


def weights_apart(policy: "Policy", owes_base: bool) -> Iterator[tuple[str, Tensor]]:
    """Adapters, and after them their base where an engine does not have it yet.

    Sharded weights are gathered by all ranks, also those that push nothing: so all have to go
    through them, and each says whether it owes its engine the base.
    """
    yield from policy.named_adapter_weights()
    if any_rank(owes_base):
        yield from policy.named_base_weights()


def merged(
    base: Mapping[str, Tensor], adapters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """All of ``base``, adapted; as an engine in this process takes it."""
    held = dict(adapters)
    for name, weight in base.items():
        yield name, merge(name, weight, held)


def seen_apart(
    held: Mapping[str, str],
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, str]:
    """Digests of base and adapters, of whoever holds them and an engine with both merged.

    Where what the engine holds is what they make when they are merged again, it is the base's.

    Args:
        held: digests of what the engine holds.
        base: weights that are adapted; others may be among them.
        adapters: as they arrived, in float32.
        dtype: the engine's.
    """
    found = dict(held) | digests((name, factor.float()) for name, factor in adapters.items())
    for name, weight in base.items():
        if (whole := merge(name, weight, adapters)) is not weight and name in held:
            same = digest(whole.to(dtype)) == held[name]
            found[name] = digest(weight.to(dtype)) if same else held[name]
    return found
