"""Peak memory of forward and backward passes, traced on a sample of the batch."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.cli.check.allocations import Allocations, Held, largest
from lightning_rl.models import heads, host_inputs
from lightning_rl.models.attention.packed import build_layout
from lightning_rl.models.heads import chunk_elements
from lightning_rl.models.host_inputs import host_memory
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.parallel.tensor import local
from lightning_rl.models.policy import Policy
from lightning_rl.models.quantized_layers import QuantizedLinear
from lightning_rl.models.recompute import layers_of, tiled_mlps
from lightning_rl.models.sampling import sampled_logits


@dataclass(frozen=True)
class Pass:
    """The memory of one forward and one backward pass over ``tokens`` tokens.

    ``chunk`` is the size in bytes of a chunk of logits, ``kept`` what stays from the forward to the
    backward pass, and ``sent`` what waits in host memory in between. ``most`` has the largest usage
    in each part of the passes: ``forward`` of the layers; ``scored``, which follows them; ``head``,
    the backward pass down to the layers; ``last``, that of the last layer; ``others``, of all
    layers before it; and ``ends``, the ends of the layers' backward passes.
    """

    tokens: int
    chunk: int
    kept: int
    sent: int
    most: dict[str, tuple[Held, ...]]

    def at(self, part: str, tokens: int, chunk: int, size: Callable[[Held], float]) -> Held:
        """Return the peak usage of a part, by ``size``, scaled to other numbers of tokens and
        chunks.
        """
        ratios = tokens / self.tokens, chunk / self.chunk
        return max((held.of(*ratios) for held in self.most[part]), key=size)


@dataclass(frozen=True)
class Activations:
    """Passes that differ in the share of the tokens that an MLP computes at a time."""

    passes: tuple[tuple[float, Pass], ...]

    @property
    def kept(self) -> int:
        """Bytes kept from the forward to the backward pass."""
        return self.passes[0][1].kept

    @property
    def turn(self) -> int:
        """Further bytes that one layer needs during its backward pass."""
        most = self.passes[0][1].most
        return max(held.grows for held in chain(most["last"], most["others"])) - self.kept

    def on_host(self, tokens: int) -> int:
        """Return the bytes in host memory for another number of tokens."""
        found = self.passes[0][1]
        return ceil(found.sent * tokens / found.tokens)

    def at(
        self, part: str, tokens: int, chunk: int, share: float, size: Callable[[Held], float]
    ) -> Held:
        """Return the usage of a pass in which MLPs compute a ``share`` of the tokens at a time.

        For shares that were not traced it is interpolated linearly, which is an upper bound: the
        maximum of several linear functions is convex.
        """
        (first, small), (last, large) = self.passes[0], self.passes[-1]
        low, high = (each.at(part, tokens, chunk, size) for each in (small, large))
        way = max(0.0, (share - first) / (last - first)) if last > first else 0.0
        return Held(*(round(a + way * (b - a)) for a, b in zip(low, high, strict=True)))


TILES = (1 / 16, 1 / 2)
"""Shares of a sample's tokens that tiled MLPs are traced with."""


def measure_activations(
    policy: Policy,
    sample: TensorDict,
    precision: str,
    tiled: bool,
    gathered: bool = False,
    bonus: bool = False,
) -> Activations:
    """Trace passes over the sample, in the Trainer's precision.

    ``tiled``: MLPs compute some of the tokens at a time. ``gathered``: weights are gathered from
    several processes, in 16 bits if these compute in 16 bits. ``bonus``: the loss has an entropy
    term.
    """
    mixed, tokens = precision == "bf16-mixed", forward_tokens(sample, policy.filling)
    if precision == "bf16-true" and policy.lm.dtype != torch.bfloat16:
        policy = copy.deepcopy(policy).bfloat16()
    elif mixed and gathered:
        policy = _halved(policy)
    tiles, passes = [mlp.forward for mlp in tiled_mlps(policy)], []
    for share in TILES if tiled else (1.0,):
        with changed(tiles, tokens=ceil(share * tokens)):
            passes.append((share, follow(policy, sample, mixed, bonus)))
    return Activations(tuple(passes))


def _halved(policy: Policy) -> Policy:
    """Return a copy with 16-bit weights, as FSDP2 gathers them; buffers stay."""
    halves = {
        id(p): nn.Parameter(p.detach().to(torch.bfloat16), p.requires_grad)
        for p in policy.parameters()
        if p.is_floating_point()
    }
    return copy.deepcopy(policy, halves)


def follow(policy: Policy, sample: TensorDict, mixed: bool = False, bonus: bool = False) -> Pass:
    """Trace a forward and a backward pass over a sample; the policy's gradients are left as they
    were.

    ``bonus``: the loss has an entropy term, which takes another chunk of logits.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    with changed(trained, grad=None), following(policy, sample, mixed) as allocations:
        parts = _Parts(allocations, layers_of(policy), trained)
        try:
            scores = policy(sample)
            kept, sent = allocations.now, allocations.host
            parts.turn()
            columns = [scores.logprobs, scores.values, scores.entropy if bonus else None]
            torch.stack([x.sum() for x in columns if x is not None]).sum().backward()
            del scores, columns
            parts.finish()
        finally:
            parts.close()
    vocabulary = policy.lm.get_output_embeddings().weight.shape[0]
    logits = int(sample["tokens", "loss_mask"].sum()) * vocabulary
    chunk = 4 * min(chunk_elements(policy.lm.device), logits)
    return Pass(forward_tokens(sample, policy.filling), chunk, kept.grows, sent, parts.found())


class _Parts:
    """Begins a new part of the trace whenever a layer is done, in both passes.

    A layer's gradients are freed then: they are sharded, or counted with the weights.
    """

    def __init__(
        self, allocations: Allocations, layers: Sequence[nn.Module], trained: Sequence[nn.Parameter]
    ) -> None:
        self.allocations = allocations
        self.forward: list[tuple[Held, ...]] = []
        self.backward: list[tuple[Held, ...]] = []
        self.ends: list[Held] = []
        own = {parameter for layer in layers for parameter in layer.parameters()}
        self._in_layers = [parameter for parameter in trained if parameter in own]
        self._hooks: list[Any] = [layer.register_forward_pre_hook(self._begun) for layer in layers]
        self._hooks += [layer.register_forward_hook(self._computed) for layer in layers]
        self._hooks += [p.register_post_accumulate_grad_hook(self._given) for p in trained]

    def turn(self) -> None:
        """Mark the end of the forward pass."""
        self.forward.append(self.allocations.begin())
        self.allocations.turned = True

    def finish(self) -> None:
        """Mark the end of the backward pass, or of one layer's."""
        self.ends.append(self.allocations.now)
        for parameter in self._in_layers:
            if parameter.grad is not None:
                size, parameter.grad = parameter.grad.nbytes, None
                self.allocations.add(size, "summed")
        self.backward.append(self.allocations.begin())

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def found(self) -> dict[str, tuple[Held, ...]]:
        """Return the peaks in the form of :class:`Pass`."""
        *layers, scored = self.forward
        head, *backward = self.backward
        last, *others = backward or [head]  # layers of a model's own kind are not known
        return {
            "forward": largest(chain(*layers)) or scored,
            "scored": scored,
            "head": head,
            "last": last,
            "others": largest(chain(self.ends[-1:], *others)),
            "ends": largest(self.ends[1:] or self.ends),
        }

    def _begun(self, layer: nn.Module, arguments: Any) -> None:
        self.allocations.scoring = False

    def _computed(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad and not self.allocations.turned:  # else it is computed again
            self.forward.append(self.allocations.begin())
            states.register_hook(self._due)

    def _due(self, gradient: Tensor) -> None:
        self.finish()
        self.allocations.scoring = False

    def _given(self, parameter: Any) -> None:
        self.allocations.count_as(parameter.grad, "gradients")


@contextmanager
def following(policy: Policy, pack: TensorDict, mixed: bool = False) -> Iterator[Allocations]:
    """Within the block, trace what a policy computes for a pack."""
    weights = [local(p) for p in policy.parameters()]
    shapes = {shape for w in weights for shape in (w.shape, w.mT.shape if w.ndim > 1 else w.shape)}
    allocations = Allocations(
        {w.untyped_storage()._cdata for w in weights},
        shapes,
        {part.mask.shape for part in build_layout(pack).batches.parts if part.mask is not None},
        local(policy.lm.get_output_embeddings().weight).shape[0],
        torch.bfloat16 if mixed and policy.lm.dtype != torch.bfloat16 else None,
    )

    def memory(tensor: Tensor) -> Tensor:
        made = host_memory(tensor)
        allocations.count_as(made, "host")
        return made

    def unpacked(*arguments: Any) -> Tensor:
        with changed([allocations], unpacking=True):
            return unpack(*arguments)

    def sampled(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        allocations.scoring = True  # until a layer's turn comes
        return sampled_logits(*arguments)

    unpack = QuantizedLinear.unpacked
    # As Lightning's autocast is, which caches no copy.
    kind = policy.lm.device.type
    cast = torch.autocast(kind, torch.bfloat16, enabled=mixed, cache_enabled=False)
    with (
        changed([host_inputs], host_memory=memory),
        changed([heads], sampled_logits=sampled),
        changed([QuantizedLinear], unpacked=unpacked),
        torch.enable_grad(),
        cast,
        allocations,
    ):
        yield allocations


@contextmanager
def changed(parts: Iterable[Any], **attributes: Any) -> Iterator[None]:
    """Within the block, set attributes of some objects to other values."""
    before = [(part, {name: getattr(part, name) for name in attributes}) for part in parts]
    try:
        for part, _ in before:
            for name, value in attributes.items():
                setattr(part, name, value)
        yield
    finally:
        for part, values in before:
            for name, value in values.items():
                setattr(part, name, value)
