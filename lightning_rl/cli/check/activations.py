"""What autograd keeps of a forward pass, measured on a sample of what will be computed."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rl.models.attention import build_layout
from lightning_rl.models.host_inputs import HostInputs
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.models.query_shares import most_keys
from lightning_rl.models.recompute import FUSED_ATTENTION, layers_of, tiled_mlps
from lightning_rl.models.sharing import head_counts, head_ranks
from lightning_rl.models.tensor import local


@dataclass(frozen=True)
class Activations:
    """Bytes of a forward pass of ``tokens`` tokens; all but ``copies`` grow with them.

    ``kept`` stay from forward to backward. ``turn`` is what one recomputed layer has besides in its
    turn of backward, and ``tile`` what its MLP would add if all of its tokens were one. ``sent``
    are in host memory, and ``fetched`` those of them that are on the device at a time. ``copies``
    are autocast's of weights.
    """

    tokens: int
    kept: int
    copies: int = 0
    turn: int = 0
    tile: int = 0
    sent: int = 0
    fetched: int = 0

    def at_once(self, tokens: int, tile: int | None) -> int:
        """Bytes on the device for another number of tokens; of MLPs a ``tile`` at a time."""
        whole = (self.kept + self.turn + self.fetched) * tokens
        return ceil((whole + self.tile * min(tokens, tile or tokens)) / self.tokens)

    def on_host(self, tokens: int) -> int:
        """Bytes in host memory for another number of tokens."""
        return ceil(self.sent * tokens / self.tokens)


def measure_activations(
    policy: Policy, sample: TensorDict, precision: str, tiled: bool
) -> Activations:
    """Measure what a forward pass of the sample keeps, in the Trainer's precision.

    ``tiled``: MLPs that compute some tokens at a time will have more than those.
    """
    if precision == "bf16-true" and policy.lm.dtype != torch.bfloat16:
        policy = copy.deepcopy(policy).bfloat16()
    mixed, tokens = precision == "bf16-mixed", forward_tokens(sample)
    layers, tiles = layers_of(policy), [mlp.forward for mlp in tiled_mlps(policy)]
    again = [layer for layer in layers if layer.gradient_checkpointing]
    size = ceil(tokens / 2) if tiled else tokens
    with changed(tiles, tokens=size):
        kept = kept_for_backward(policy, sample, mixed)
        sending = [x for x in again if isinstance(x._gradient_checkpointing_func, HostInputs)]
        sent = 0
        if sending:
            [plain] = {x._gradient_checkpointing_func.checkpoint for x in sending}
            with changed(sending, _gradient_checkpointing_func=plain):
                sent = kept_for_backward(policy, sample, mixed).activations - kept.activations
    if not again:
        return Activations(tokens, kept.activations, kept.copies)
    turn, tile = _turn(policy, sample, mixed, tiled)
    if not layers[-1].gradient_checkpointing:
        turn = 0  # it has given back as much by then
    return Activations(
        tokens,
        kept.activations,
        kept.copies,
        max(0, turn - kept.attention // len(again)),
        tile,
        sent,
        sent // len(again),
    )


def _turn(policy: Policy, sample: TensorDict, mixed: bool, tiled: bool) -> tuple[int, int]:
    """Bytes of one layer that is computed again, and of its MLP if that is in tiles.

    Besides what autograd keeps, a gradient of the largest of these.
    """
    layers, tiles = layers_of(policy), [mlp.forward for mlp in tiled_mlps(policy)]
    # Of a kind: a tower's layers may be many, and small beside the language model's.
    count = min(Counter(type(layer) for layer in layers).values())

    def measured(size: int) -> tuple[int, int]:
        with changed(tiles, tokens=size):
            found = kept_for_backward(policy, sample, mixed)
        return found.activations // count, found.largest

    tokens = forward_tokens(sample)
    with changed(layers, gradient_checkpointing=False):
        whole, largest = measured(tokens)
        if not tiled:
            return whole + largest, 0
        apart, largest_apart = measured(ceil(tokens / 2))
    return apart + largest_apart, whole - apart + largest


@contextmanager
def changed(parts: Iterable[Any], **attributes: Any) -> Iterator[None]:
    """Give attributes of some objects other values in this block."""
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


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps: ``activations``, which grow with tokens, and weights' ``copies``.

    Of the first, ``attention`` are kept by layers that are recomputed otherwise; ``largest`` has
    one of them that gets a gradient.
    """

    activations: int
    copies: int
    attention: int
    largest: int


def kept_for_backward(policy: Policy, pack: TensorDict, bf16_mixed: bool = False) -> Kept:
    """Bytes kept of a pack's forward pass; parameters themselves, and the host's, do not count."""
    parameters = [local(p) for p in policy.parameters()]
    own = {p.untyped_storage()._cdata for p in parameters}
    shapes = {shape for p in parameters for shape in (p.shape, p.shape[::-1])}
    kept: dict[int, tuple[int, bool]] = {}
    largest = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal largest
        storage = tensor.untyped_storage()  # by its object: fake tensors have no data
        if storage._cdata not in own:  # views share a storage, which counts once
            is_weight = bf16_mixed and tensor.dtype == torch.bfloat16 and tensor.shape in shapes
            kept[storage._cdata] = storage.nbytes(), is_weight
            if tensor.requires_grad and not is_weight:
                largest = max(largest, tensor.nbytes)
        return tensor.detach()  # an output that its own graph refers to would never be freed

    # As Lightning's autocast is, which caches no copy.
    kind = policy.lm.device.type
    cast = torch.autocast(kind, torch.bfloat16, enabled=bf16_mixed, cache_enabled=False)
    saved = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
    # What selective recomputation keeps no hook is told of.
    selective = policy.recompute is not None and policy.recompute.keep == "attention"
    attention = _AttentionOutputs()
    with torch.enable_grad(), saved, cast, attention if selective else nullcontext():
        scores = policy(pack)
    del scores  # not before: what is freed meanwhile could be counted again at its place
    more = {key: size for key, size in attention.sizes.items() if key not in kept}
    copies = sum(size for size, is_weight in kept.values() if is_weight)
    attended = sum(more.values())
    total = sum(size for size, _ in kept.values()) + attended
    return Kept(total - copies, copies, attended, largest)


class _AttentionOutputs(TorchDispatchMode):
    """Notes the sizes of storages that fused attention returns, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if func.name() in FUSED_ATTENTION:
            for part in returned:
                if isinstance(part, Tensor):
                    storage = part.untyped_storage()
                    self.sizes[storage._cdata] = storage.nbytes()
        return returned


def shared_activations(policy: Policy, kept: int, pack: TensorDict, ranks: int, width: int) -> int:
    """Bytes of a pack's activations on each of the ranks that compute it together.

    A share of what one keeps that computes it alone, ``kept``; and once more a layer's attention
    outputs, as they are before they are sent on (with gradient checkpointing, of one layer). Where
    ranks share queries, a layer keeps the keys and values that its kernel reads of all tokens.

    Args:
        policy: what computes.
        kept: bytes.
        pack: what is computed.
        ranks: how many they are; 1: it is computed alone.
        width: bytes of a number.
    """
    if ranks == 1:
        return kept
    text, layers = policy.lm.config.get_text_config(), layers_of(policy)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keeping = sum(not layer.gradient_checkpointing for layer in layers) or 1
    heads = head_counts(text, 1 if policy.tensor is None else policy.tensor.size)
    together = head_ranks(ranks, *heads)
    places, query = ranks // together, heads[0]
    outputs = forward_tokens(pack) * query * size / ranks
    segments = build_layout(pack).segments
    seen = most_keys(segments, places) - most_keys(segments, 1) / places
    # What is measured has keys once for each query head.
    return ceil(kept / ranks + keeping * width * (outputs + 2 * seen * query // together * size))
