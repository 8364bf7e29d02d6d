"""Moments of an update, and what a process has in memory at each of them, by purpose."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import nn

from lightning_rl.cli.check.allocations import Held
from lightning_rl.models.expert import hosts_in
from lightning_rl.models.policy import Policy
from lightning_rl.models.recompute import layers_of

Parts = dict[str, int]


class Moment(NamedTuple):
    """What is there beside what stays between updates, and when."""

    name: str
    parts: Parts

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


HEAD, HEAD_BACKWARD = "the head computes logits", "the head's backward pass"
LAYER, LAYER_BACKWARD = "a layer computes", "a layer's backward pass"
REDUCED, STEP = "gradients are summed over processes", "the optimizer's step"


@dataclass(frozen=True)
class Sizes:
    """What moments are made of.

    ``held`` says what is there at a part of the passes (:class:`~.activations.Pass`) when that is
    most by a size, in bytes; ``name`` what of it grows with tokens. ``gradients``: of all that is
    trained, on this process. ``stepped``: what the optimizer has for itself while it steps. With
    ``earlier`` passes before this one all gradients are there; else those that it has left so far.
    """

    name: str
    held: Callable[[str, Callable[[Held], float]], Held]
    gradients: int
    stepped: int
    earlier: bool

    def moment(self, name: str, part: str, parts: Callable[[Held], Parts]) -> Moment:
        """Of a part of the passes, when most is there by what is told of what is held."""
        return Moment(name, parts(self.held(part, lambda held: sum(parts(held).values()))))


class Residence(Protocol):
    """How weights are where they compute."""

    def moments(self, sizes: Sizes) -> Iterator[Moment]:
        """Those that may be the one at which most is there."""


class Alone:
    """A process has all weights, and adds up gradients where they stay."""

    def moments(self, sizes: Sizes) -> Iterator[Moment]:
        """As :class:`Residence` says."""

        def parts(held: Held) -> Parts:
            given = held.gradients + held.summed
            return {
                "gradients": sizes.gradients if sizes.earlier else given,
                sizes.name: held.states,
                "logits": held.logits,
                "copies of weights": held.copies,
            }

        yield sizes.moment(LAYER, "forward", parts)
        yield sizes.moment(HEAD, "scored", parts)
        yield sizes.moment(HEAD_BACKWARD, "head", parts)
        for part in ("last", "others"):
            yield sizes.moment(LAYER_BACKWARD, part, parts)
        yield Moment(STEP, {"gradients": sizes.gradients, "optimizer's own": sizes.stepped})


class Group(NamedTuple):
    """Weights that FSDP2 gathers together, from so many ``ranks``.

    ``weights`` are their bytes where they compute, and ``gradients`` bytes of their gradients, in
    the float32 in which they are summed.
    """

    weights: int
    gradients: int
    ranks: int

    @property
    def message(self) -> int:
        """What an all-gather fills, of which weights are copied; one process needs none."""
        return self.weights if self.ranks > 1 else 0


@dataclass(frozen=True)
class Sharded:
    """FSDP2: a process has a part of each weight, and gathers a layer's when they compute.

    ``outside`` of layers weights are whole from the forward pass to the end of the backward pass,
    and so are their gradients until then. A ``layer`` is gathered by itself, the largest of them
    here, and so are its ``experts`` where processes have these together. In the forward pass the
    message of an all-gather stays until the next one's has come; in the backward pass the layer
    before is gathered ahead, and its message waits. A layer's gradients are whole until all are
    there. Then they are copied into one message to be summed, which stays until the next layer's.
    """

    outside: Group
    layer: Group
    experts: Group
    shards: int

    @classmethod
    def of(cls, policy: Policy, width: int, shards: int, expert: int) -> "Sharded":
        """Of a process's part of a policy, whose weights compute in ``width`` bytes a number."""
        stacks = [set(stack.parameters()) for stack in hosts_in(policy)]
        apart = set().union(*stacks)
        layers = [set(layer.parameters()) - apart for layer in layers_of(policy)]
        outside = set(policy.parameters()).difference(*layers, apart)

        def group(parts: Iterable[set[nn.Parameter]], ranks: int) -> Group:
            sizes = [(size_of(part, width), size_of(part, 4, trained_only=True)) for part in parts]
            return Group(*max(sizes, default=(0, 0)), ranks)

        return cls(
            group([outside], shards),
            group(layers, shards),
            group(stacks, shards // expert),
            shards,
        )

    def moments(self, sizes: Sizes) -> Iterator[Moment]:
        """As :class:`Residence` says."""
        last = self.experts if self.experts.weights else self.layer
        layer = self.layer.weights + self.experts.weights

        def moment(name: str, part: str, gathered: int, summed: int = 0) -> Moment:
            def parts(held: Held) -> Parts:
                return {
                    "gradients": sizes.gradients if sizes.earlier else held.summed // self.shards,
                    sizes.name: held.states,
                    "logits": held.logits,
                    "gathered": self.outside.weights + gathered,
                    "whole gradients": held.copies + held.gradients,
                    "gradients in a message": summed,
                }

            return sizes.moment(name, part, parts)

        yield moment(LAYER, "forward", layer + last.message)
        yield moment(HEAD, "scored", last.message)
        yield moment(HEAD_BACKWARD, "head", self.layer.message)
        yield moment(LAYER_BACKWARD, "last", layer + self.layer.message)
        summed = self.layer.gradients
        yield moment(LAYER_BACKWARD, "others", layer + self.layer.message, summed)
        yield moment(REDUCED, "ends", self.layer.message, summed)
        outside = self.outside.gradients
        yield Moment(
            REDUCED,
            {
                "gradients": sizes.gradients,
                "whole gradients": outside,
                "gradients in a message": outside,
            },
        )
        yield Moment(STEP, {"gradients": sizes.gradients, "optimizer's own": sizes.stepped})


def size_of(parameters: Iterable[nn.Parameter], width: int, trained_only: bool = False) -> int:
    """Bytes, where a float takes ``width``."""
    return sum(
        p.numel() * (width if p.is_floating_point() else p.element_size())
        for p in parameters
        if p.requires_grad or not trained_only
    )
