"""Make pushes arrive stale or torn, for :mod:`benchmarks.ledger` and the tests.

A fault changes what is on its way from the trainer to the engine, after its digests were noted and
before the engine loads it. Everything else is the real thing.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.stream import Weights

Tensors = dict[str, Tensor]
Fault = Callable[["Torn", Tensors], None]
"""Changes what arrives, by name, in place."""


@dataclass
class Torn:
    """The weights that a fault has to work with.

    Args:
        old: what the push before brought.
        dtype: the engine's.
        draw: where it happens.
    """

    old: Mapping[str, Tensor]
    dtype: torch.dtype
    draw: random.Random

    def some(self, arriving: Tensors, suits: Callable[[str], bool] = lambda name: True) -> str:
        """Return the name of a weight that has changed since, as the engine holds it."""
        names = [
            name
            for name, weight in arriving.items()
            if suits(name) and not torch.equal(self.cast(weight), self.cast(self.old[name]))
        ]
        return self.draw.choice(names)

    def matrix(self, arriving: Tensors) -> str:
        """Return the name of a changed weight that has rows and columns."""
        return self.some(arriving, lambda name: arriving[name].dim() == 2)

    def cast(self, weight: Tensor) -> Tensor:
        """Cast a weight as the engine is to hold it."""
        return weight.to(self.dtype)


def one_tensor_stale(torn: Torn, new: Tensors) -> None:
    name = torn.some(new)
    new[name] = torn.old[name]


def one_row_stale(torn: Torn, new: Tensors) -> None:
    name = torn.matrix(new)
    rows = (torn.cast(new[name]) != torn.cast(torn.old[name])).any(1).nonzero().flatten().tolist()
    row = torn.draw.choice(rows)
    new[name] = new[name].clone()
    new[name][row] = torn.old[name][row]


def one_number_off(torn: Torn, new: Tensors) -> None:
    """Move one number by the least that the engine's dtype can tell."""
    name = torn.some(new)
    held = torn.cast(new[name]).clone()
    bits = held.view(-1).view(torch.int16 if held.element_size() == 2 else torch.int32)
    bits[torn.draw.randrange(len(bits))] ^= 1
    new[name] = held.to(new[name].dtype)


def all_stale(torn: Torn, new: Tensors) -> None:
    new.update(torn.old)


def torn_bucket(torn: Torn, new: Tensors) -> None:
    """Lose the end of a bucket from some place on."""
    names = list(new)
    last = names.index(torn.some(new))
    for name in names[torn.draw.randint(0, last) :]:
        new[name] = torn.old[name]


def torn_tensor(torn: Torn, new: Tensors) -> None:
    """Lose the end of a tensor, where what was there before shows."""
    name = torn.some(new)
    flat, old = new[name].flatten().clone(), torn.old[name].flatten()
    changed = (torn.cast(flat) != torn.cast(old)).nonzero().flatten().tolist()
    begin = torn.draw.randint(0, changed[-1])
    flat[begin:] = old[begin:]
    new[name] = flat.view(new[name].shape)


def cut_short(torn: Torn, new: Tensors) -> None:
    """Replace the end of a tensor by zeros."""
    name = torn.some(new)
    flat = new[name].flatten().clone()
    flat[torn.draw.randrange(len(flat)) :] = 0
    new[name] = flat.view(new[name].shape)


def never_came(torn: Torn, new: Tensors) -> None:
    name = torn.some(new)
    new[name] = torch.zeros_like(new[name])


def swapped_tensors(torn: Torn, new: Tensors) -> None:
    """Swap keys for values, or another two tensors of one shape."""
    name = torn.matrix(new)
    same = [
        n for n, w in new.items() if w.shape == new[name].shape and not torch.equal(w, new[name])
    ]
    if not same:
        return swapped_tensors(torn, new)
    other = torn.draw.choice(same)
    new[name], new[other] = new[other], new[name]
    return None


def swapped_rows(torn: Torn, new: Tensors) -> None:
    name = torn.matrix(new)
    one, other = torn.draw.sample(range(len(new[name])), 2)
    new[name] = new[name].clone()
    new[name][[one, other]] = new[name][[other, one]]


def moved_by_one(torn: Torn, new: Tensors) -> None:
    name = torn.matrix(new)
    new[name] = new[name].flatten().roll(1).view(new[name].shape)


def transposed_square(torn: Torn, new: Tensors) -> None:
    name = torn.some(new, lambda n: new[n].dim() == 2 and new[n].shape[0] == new[n].shape[1])
    new[name] = new[name].t().contiguous()


def key_and_value_swapped(torn: Torn, new: Tensors) -> None:
    """Swap slices of what engines fuse."""
    name = torn.some(new, lambda n: n.endswith("k_proj.weight"))
    value = name.replace("k_proj", "v_proj")
    new[name], new[value] = new[value], new[name]


def gate_and_up_swapped(torn: Torn, new: Tensors) -> None:
    name = torn.some(new, lambda n: n.endswith("gate_proj.weight"))
    up = name.replace("gate_proj", "up_proj")
    new[name], new[up] = new[up], new[name]


def layers_swapped(torn: Torn, new: Tensors) -> None:
    for name in [n for n in new if ".layers.0." in n]:
        other = name.replace(".layers.0.", ".layers.1.")
        new[name], new[other] = new[other], new[name]


def signs_of_every_second(torn: Torn, new: Tensors) -> None:
    """Flip the signs of every second row, as a rotary embedding in another layout would."""
    name = torn.matrix(new)
    new[name] = new[name].clone()
    new[name][:, 1::2] *= -1


def cast_wrongly(torn: Torn, new: Tensors) -> None:
    """Cast by way of 16 bits that the engine has not, or cut off where it rounds."""
    name = torn.matrix(new)
    if torn.dtype == torch.float32:
        new[name] = new[name].bfloat16().float()
    else:
        new[name] = (new[name].float().view(torch.int32) & -65536).view(torch.float32)


def stale_head(torn: Torn, new: Tensors) -> None:
    """Keep the output head as it was, as one that is tied and packed apart may."""
    new["lm_head.weight"] = torn.old["lm_head.weight"]


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        one_tensor_stale, one_row_stale, one_number_off, all_stale, torn_bucket, torn_tensor,
        cut_short, never_came, swapped_tensors, swapped_rows, moved_by_one, transposed_square,
        key_and_value_swapped, gate_and_up_swapped, layers_swapped, signs_of_every_second,
        cast_wrongly, stale_head,
    )
}  # fmt: skip


class TornTransport(MemoryTransport):
    """Lets a fault happen on the way: ``tear`` changes what arrives of the next push."""

    tear: Callable[[Tensors], None] | None = None

    def push(self, weights: Weights, version: int) -> None:
        super().push(weights if self.tear is None else self._torn(weights), version)

    def _torn(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        assert self.tear is not None
        arriving = {name: weight.detach() for name, weight in weights}
        self.tear(arriving)
        yield from arriving.items()
