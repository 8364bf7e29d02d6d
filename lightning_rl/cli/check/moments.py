"""The moments of an update, and a process's memory at each of them, by purpose."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import nn

from lightning_rl.cli.check.allocations import Held
from lightning_rl.models.parallel.expert import hosts_in
from lightning_rl.models.policy import Policy
from lightning_rl.models.recompute import layers_of

Parts = dict[str, int]


class Moment(NamedTuple):
    """A moment: its name, and the memory in addition to what stays between updates."""

    name: str
    parts: Parts

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())


HEAD, HEAD_BACKWARD = "the head computes logits", "the head's backward pass"
LAYER, LAYER_BACKWARD = "a layer computes", "a layer's backward pass"
REDUCED, STEP = "gradients are summed over processes", "the optimizer's step"


@dataclass(frozen=True)
class Sizes:
    """The sizes from which the moments are computed.

    ``held`` returns the usage in a part of the passes (:class:`~.activations.Pass`) at its peak by
    a given size, in bytes; ``name`` names the part of it that grows with tokens. ``gradients`` are
    the bytes of all trained parameters' gradients, on this process. ``stepped`` is the optimizer's
    workspace during its step. With ``earlier`` passes before this one, all gradients exist;
    otherwise only those computed so far.
    """

    name: str
    held: Callable[[str, Callable[[Held], float]], Held]
    gradients: int
    stepped: int
    earlier: bool

    def moment(self, name: str, part: str, parts: Callable[[Held], Parts]) -> Moment:
        """Return the moment of a part at which the sum of ``parts`` is largest."""
        return Moment(name, parts(self.held(part, lambda held: sum(parts(held).values()))))


class Residence(Protocol):
    """How weights are placed where they are computed with."""

    def moments(self, sizes: Sizes) -> Iterator[Moment]:
        """Yield the moments at which usage may peak."""


class Alone:
    """A process has all weights, and accumulates gradients in place."""

    def moments(self, sizes: Sizes) -> Iterator[Moment]:
        """Yield the moments at which usage may peak."""

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
    """Weights that FSDP2 gathers together from ``ranks`` processes.

    ``weights`` are their bytes as they are computed with, and ``gradients`` those of their
    gradients, in the float32 in which they are reduced.
    """

    weights: int
    gradients: int
    ranks: int

    @property
    def message(self) -> int:
        """Bytes of an all-gather's buffer, from which weights are copied; 0 for one process."""
        return self.weights if self.ranks > 1 else 0


@dataclass(frozen=True)
class Sharded:
    """FSDP2: a process has a shard of each weight, and gathers a layer's weights to compute with
    them.

    Weights ``outside`` of layers are gathered from the forward pass to the end of the backward
    pass, and their gradients are unsharded until then. ``layer`` is the largest layer, gathered by
    itself, and so are its ``experts`` with expert parallelism. In the forward pass the buffer of an
    all-gather stays until the next one's has arrived; in the backward pass the preceding layer is
    prefetched, and its buffer waits. A layer's gradients are unsharded until all are computed. Then
    they are copied into one buffer to be reduced, which stays until the next layer's.
    """

    outside: Group
    layer: Group
    experts: Group
    shards: int

    @classmethod
    def of(cls, policy: Policy, width: int, shards: int, expert: int) -> "Sharded":
        """Return the sizes of a process's shard of a policy that computes in ``width`` bytes per
        number.
        """
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
        """Yield the moments at which usage may peak."""
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
    """Return the bytes of parameters, with ``width`` bytes per floating-point number."""
    return sum(
        p.numel() * (width if p.is_floating_point() else p.element_size())
        for p in parameters
        if p.requires_grad or not trained_only
    )
