"""The memory that training will take, on the device that it will run on."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.data.packing import select
from lightning_rl.models.heads import chunk_elements
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy


@dataclass(frozen=True)
class Placement:
    """The way a Trainer computes, and the place where it keeps what it trains.

    Weights are shared by ``shards`` processes (FSDP2), 1: each has them whole; with ``cpu_offload``
    what each has of them is in host memory. ``device`` is what computes, in Lightning's
    ``precision``; with ``masters`` weights of 16 bits are trained in copies of 32.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "32-true"
    masters: bool = True
    shards: int = 1
    cpu_offload: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, at the moment of an update when most are in use; per process.

    ``parts`` are on the device that computes, ``host`` in the host's memory beside it.
    """

    parts: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.parts.values())

    def lines(self) -> Iterator[str]:
        """Yield lines for a person."""
        for name, size in self.parts.items():
            yield f"{name:<30}{in_units(size):>11}"
        yield f"{'together':<30}{in_units(self.total):>11}"
        for name, size in self.host.items():
            yield f"{name + ', in host memory':<41}{in_units(size):>11}"


def in_units(size: int) -> str:
    """Bytes for a person."""
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def training_memory(
    policy: Policy,
    others: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    pack: TensorDict,
    placement: Placement | None = None,
) -> MemoryPlan:
    """Estimate what an update keeps in memory, with ``pack`` the largest that it computes.

    - weights: the bytes of all parameters; ``others`` are further models, such as a reference.
    - gradients: as many bytes as the trained parameters.
    - master weights: with ``bf16-true`` float32 copies of what is trained.
    - optimizer: what one step leaves in its state, per trained element (AdamW: two tensors).
      Of all these a process has one part in as many as share them.
    - gathered: of shared weights those outside of layers, and two layers (FSDP2 gathers one ahead);
      their gradients, of one layer, until they are summed.
    - activations: what autograd keeps for the backward pass, in the dtypes that compute. Measured
      on one group of the pack and scaled by its tokens, for attention and everything else keep
      memory in proportion to them. With gradient checkpointing one layer's come on top.
    - bfloat16 weights: autocast's copies of whole weights, which autograd keeps as well.
    - logits: two chunks of fp32 logits (:mod:`lightning_rl.models.heads` never holds more).
    - backward: the gradient of the largest parameter, before it is added to the others.
    """
    placement = placement or Placement()
    true, mixed = (placement.precision == name for name in ("bf16-true", "bf16-mixed"))
    width = 2 if true else 4
    trained = [p for p in policy.parameters() if p.requires_grad]
    head = policy.lm.get_output_embeddings().weight
    group = pack["rollouts", "group"]
    sample = select(pack, (group == group[0]).nonzero().squeeze(1))
    tokens, share = forward_tokens(pack), forward_tokens(pack) / forward_tokens(sample)
    measured = copy.deepcopy(policy).bfloat16() if true and head.dtype != torch.bfloat16 else policy
    kept, copies = kept_for_backward(measured, sample, mixed)
    kept += _recomputed(measured, sample, mixed)
    loss_tokens = int(pack["tokens", "loss_mask"].sum())
    state = {
        "weights": width * _elements(policy.parameters()),
        "other models": sum(width * _elements(module.parameters()) for module in others),
        "gradients": width * _elements(trained),
        f"optimizer ({type(optimizer).__name__})": _state_size(optimizer, trained),
    }
    if true and placement.masters:
        state["master weights"] = 4 * _elements(trained)
    state = {name: ceil(size / placement.shards) for name, size in state.items()}
    parts = {
        f"activations of {tokens:,} tokens": int(kept * share),
        "logits": 2 * 4 * min(chunk_elements(placement.device), loss_tokens * head.shape[0]),
        "backward": width * max(p.numel() for p in trained),
    }
    if placement.shards > 1:
        parts["gathered"] = _gathered(policy, 2 if true or mixed else 4)
    elif mixed:
        parts["bfloat16 weights"] = copies + 2 * head.numel()
    if placement.cpu_offload:
        return MemoryPlan(parts, state)
    return MemoryPlan(state | parts)


def kept_for_backward(
    policy: Policy, pack: TensorDict, bf16_mixed: bool = False
) -> tuple[int, int]:
    """Bytes that autograd keeps of a pack's forward pass, and of them copies of weights.

    The first are in proportion to the tokens. Parameters themselves are not counted.
    """
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    shapes = {shape for p in policy.parameters() for shape in (p.shape, p.shape[::-1])}
    kept: dict[int, tuple[int, bool]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:  # views share a storage, which counts once
            is_weight = bf16_mixed and tensor.dtype == torch.bfloat16 and tensor.shape in shapes
            kept[storage.data_ptr()] = storage.nbytes(), is_weight
        return tensor

    # As Lightning's autocast is, which caches no copy.
    kind = policy.lm.device.type
    cast = torch.autocast(kind, torch.bfloat16, enabled=bf16_mixed, cache_enabled=False)
    saved = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
    with torch.enable_grad(), saved, cast:
        scores = policy(pack)
    del scores  # not before: what is freed meanwhile could be counted again at its place
    copies = sum(size for size, is_weight in kept.values() if is_weight)
    return sum(size for size, _ in kept.values()) - copies, copies


def _recomputed(policy: Policy, pack: TensorDict, bf16_mixed: bool) -> int:
    """Bytes that one layer keeps in its turn of backward, with gradient checkpointing."""
    layers = _layers(policy)
    if not any(layer.gradient_checkpointing for layer in layers):
        return 0
    with _without_checkpointing(layers):
        everything, _ = kept_for_backward(policy, pack, bf16_mixed)
    return everything // len(layers)


@contextmanager
def _without_checkpointing(layers: Sequence[GradientCheckpointingLayer]) -> Iterator[None]:
    before = [layer.gradient_checkpointing for layer in layers]
    try:
        for layer in layers:
            layer.gradient_checkpointing = False
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.gradient_checkpointing = was


def _gathered(policy: Policy, width: int) -> int:
    """Bytes of the weights that a process has whole at a time, and of their gradients."""
    layers = _layers(policy)
    inside = {p for layer in layers for p in layer.parameters()}
    outside = [p for p in policy.parameters() if p not in inside]

    def largest(trained_only: bool) -> int:
        return max(_elements(layer.parameters(), trained_only) for layer in layers)

    weights = _elements(outside) + 2 * largest(False)
    gradients = _elements(outside, trained_only=True) + largest(True)
    return width * (weights + gradients)


def _layers(policy: Policy) -> list[GradientCheckpointingLayer]:
    return [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]


def _elements(parameters: Iterable[nn.Parameter], trained_only: bool = False) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad or not trained_only)


def _state_size(optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]) -> int:
    """Bytes of one step's state, scaled from the optimizer's own single parameter."""
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].values()
    per_element = sum(
        t.numel() * t.element_size()
        for t in state
        if isinstance(t, Tensor) and t.numel() == parameter.numel()
    )
    return per_element * sum(p.numel() for p in trained) // parameter.numel()


@dataclass(frozen=True)
class CardPlan:
    """A training process and what works beside it, on one GPU; all in bytes.

    ``engine`` is what the engine takes of this GPU, and ``at_start`` what has to be free when it
    starts, beside weights and other models; ``kept_copy``, what rank 0 keeps of what it sent. One
    that ``sleeps`` takes nothing in between, but needs as much in each iteration as at its start,
    and then the optimizer's state is there, too.
    """

    card: int
    training: MemoryPlan
    engine: int = 0
    at_start: int = 0
    kept_copy: int = 0
    sleeps: bool = False

    @property
    def missing(self) -> int:
        """Bytes that the GPU lacks; none or less: it fits."""
        names = ["weights", "other models"]
        if self.sleeps:
            names += ["optimizer", "master weights"]
        stays = sum(n for part, n in self.training.parts.items() if part.startswith(tuple(names)))
        needed = self.training.total + self.engine + self.kept_copy
        return max(needed, stays + self.at_start) - self.card

    def lines(self) -> Iterator[str]:
        """Yield lines for a person."""
        parts = {
            "training": self.training.total,
            "engine": self.engine,
            "engine in turn": self.at_start if self.sleeps else 0,
            "keep_copy": self.kept_copy,
        }
        together = " + ".join(f"{in_units(size)} {name}" for name, size in parts.items() if size)
        of = f"GPU of {in_units(self.card)}: {together}"
        if self.missing <= 0:
            yield f"{of}: fits, {in_units(-self.missing)} to spare"
        else:
            yield f"{of}: DOES NOT FIT, {in_units(self.missing)} too much; {self._advice()}"

    def _advice(self) -> str:
        """About the largest of what can be made smaller."""
        names = ("weights", "other models", "gradients", "optimizer", "master weights")
        state = sum(n for part, n in self.training.parts.items() if part.startswith(names))
        engine = self.at_start if self.sleeps else self.engine
        sleeping = "" if self.sleeps else ", or let it sleep meanwhile (sleep_level)"
        sizes = {
            "train with lora, or share the weights: strategy ShardedStrategy with more devices, or "
            "its cpu_offload: true": state,
            "lower max_tokens_per_pack, or set gradient_checkpointing: true": self.training.total
            - state,
            f"lower the engine's gpu_memory_utilization or kv_cache_gb{sleeping}": engine,
        }
        return max(sizes, key=lambda advice: sizes[advice])
