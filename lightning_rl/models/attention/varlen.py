"""Packed attention in one fused kernel call, where the device has one: torch's ``varlen_attn``.

The kernel takes segments of queries and of keys, one after another without padding. Queries are the
micro-batch's own row; a completion's keys are its prompt's and its own. Causal, with fewer queries
than keys, means aligned at the end, as a completion after its prompt needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.data.batch import ranges
from lightning_rl.run.processes.dist import fell_back

CAUSAL = (-1, 0)  # the kernel's window: any number of tokens to the left, none to the right
LARGEST_HEAD = 256


@dataclass(slots=True)
class Varlen:
    """N segments: ``keys`` (K,) index the rows of keys; the rest is where segments begin.

    ``query_ends`` and ``key_ends`` (N + 1,), int32, are cumulative lengths from 0.
    """

    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int

    def to(self, device: torch.device) -> "Varlen":
        """On another device."""
        keys, query_ends, key_ends = (
            x.to(device, non_blocking=True) for x in (self.keys, self.query_ends, self.key_ends)
        )
        return Varlen(keys, query_ends, key_ends, self.longest_query, self.longest_key)


def build_varlen(
    start: Tensor,
    length: Tensor,
    prefix_start: Tensor,
    prefix_length: Tensor,
    asking: Tensor | None = None,
) -> Varlen:
    """Build a layout from the place and length of each segment and of its prefix, all (N,).

    The last ``asking`` tokens of each segment are queries; None: all are. Segments without any are
    left out; the queries of the others follow each other without a gap.
    """
    asking = length if asking is None else asking
    full = asking > 0
    start, length, prefix_start, prefix_length, asking = (
        x[full] for x in (start, length, prefix_start, prefix_length, asking)
    )
    starts = torch.stack([prefix_start, start], 1).flatten()
    lengths = torch.stack([prefix_length, length], 1).flatten()
    keys = ranges(starts, lengths)
    key_length = prefix_length + length
    query_ends, key_ends = (F.pad(x.cumsum(0), (1, 0)).int() for x in (asking, key_length))
    longest = int(asking.max()), int(key_length.max())
    return Varlen(keys, query_ends, key_ends, *longest)


@dataclass(frozen=True)
class Fused:
    """The part of a micro-batch's attention that the kernel computes.

    It is decided before a model's layers run: a trial of the kernel within a layer would be part of
    what that layer keeps for its backward pass, and of what ``torch.compile`` traces.

    Args:
        dtype: the 16-bit dtype that it computes in.
        heads: width of the heads, and whether a sliding window is shorter than the micro-batch's
            longest rollout, of the layers that it takes.
        layout: which tokens attend to which.
        kernel: what computes it, of the arguments of :func:`plain_varlen`.
    """

    dtype: torch.dtype
    heads: frozenset[tuple[int, bool]]
    layout: Varlen
    kernel: Callable[..., Tensor]


def fused_dtype(lm: PreTrainedModel, device: torch.device) -> torch.dtype | None:
    """The dtype in which the kernel would compute a model's attention; None: it cannot."""
    if device.type != "cuda":
        return None
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else lm.dtype
    if dtype in (torch.float16, torch.bfloat16):
        return dtype
    if torch.is_grad_enabled():  # else it may be a check of the model, without autocast
        name = str(dtype).removeprefix("torch.")
        _fall_back(f"it has no {name}; trainer.precision bf16-mixed or bf16-true has another")
    return None


def fused_heads(
    lm: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> frozenset[tuple[int, bool]]:
    """Width of the heads, and whether there is a sliding window, of layers that the kernel takes.

    Each kind that a model has is tried once for each device and dtype.
    """
    config = lm.config.get_text_config()
    widths = {config.hidden_size // config.num_attention_heads}
    if isinstance(own := getattr(config, "head_dim", None), int):
        widths = {own}
    widths |= {m.head_dim for m in lm.modules() if isinstance(getattr(m, "head_dim", None), int)}
    windows = {False} | {True for m in lm.modules() if getattr(m, "sliding_window", None)}
    found = set()
    for width, windowed in product(sorted(widths), sorted(windows)):
        if width > LARGEST_HEAD:
            _fall_back(f"the model's heads of {width} exceed the {LARGEST_HEAD} that it takes")
        elif kernel_works(device, dtype, width, windowed):
            found.add((width, windowed))
    return frozenset(found)


def _fall_back(reason: str) -> None:
    fell_back("torch's varlen_attn", reason, "SDPA over buckets")


@cache
def fused_kernel() -> Callable[..., Any]:
    """torch's kernel; imported where it is used, since that takes a second."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in signature(varlen_attn).parameters:
        return varlen_attn

    # torch 2.11 accepts fewer key than query heads without an argument.
    def untold(*args: Any, enable_gqa: bool, **options: Any) -> Any:
        return varlen_attn(*args, **options)

    return untold


@cache
def kernel_works(
    device: torch.device, dtype: torch.dtype, width: int, windowed: bool = False
) -> bool:
    """Try the kernel: it must exist for this device, and attend as this module needs it to.

    Both its outputs and their gradients; ``windowed``: through a sliding window.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, width, generator=generator, device="cpu").to(device, dtype)
        for n, heads in ((5, 2), (7, 1), (7, 1))
    )
    # Two segments: 2 queries on the last of 4 keys, and 3 on 3.
    segments = ([0, 2], [2, 3], [0, 0], [2, 0])
    layout = build_varlen(*(torch.tensor(x, device="cpu") for x in segments))
    layout.keys = torch.arange(7, device="cpu")

    def both_ways(kernel: Callable[..., Tensor], layout: Varlen, dtype: torch.dtype) -> Tensor:
        query, key, value = (x.to(dtype, copy=True).requires_grad_() for x in (q, k, v))
        out = attend(query, key, value, layout, None, kernel, 2 if windowed else None)
        gradients = torch.autograd.grad(out.square().sum(), (query, key, value))
        return torch.cat([x.float().flatten() for x in (out, *gradients)])

    try:
        with torch.enable_grad():
            ours = both_ways(fused_kernel(), layout.to(device), dtype)
            theirs = both_ways(plain_varlen, layout, torch.float32)
    except (ImportError, NotImplementedError, RuntimeError, TypeError) as error:  # not here, or yet
        message = str(error).strip() or "no more is said"
        _fall_back(f"{type(error).__name__}: {message.splitlines()[0]}")
        return False
    # bfloat16 rounds to 1/256, which makes 0.003 here; a wrong mask is off by 0.6.
    off = float((ours - theirs).detach().norm() / theirs.detach().norm())
    if not off < 0.02:
        _fall_back(f"here it computes something else, {off:.2g} off")
        return False
    return True


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Varlen,
    scale: float | None,
    kernel: Callable[..., Tensor],
    window: int | None = None,
) -> Tensor:
    """Attention of q (Q, H, D) on k and v (S, Hkv, D), of shape (Q, H, D).

    ``window``: tokens that a query sees, itself included; None: all before it.
    """
    return kernel(
        q,
        k[layout.keys],
        v[layout.keys],
        layout.query_ends,
        layout.key_ends,
        layout.longest_query,
        layout.longest_key,
        scale=scale,
        window_size=CAUSAL if window is None else (window - 1, 0),
        enable_gqa=True,
    )


def plain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """The kernel's result, segment by segment: its definition, on any device."""
    outputs = []
    for (i, j), (m, n) in zip(query_ends.unfold(0, 2, 1), key_ends.unfold(0, 2, 1), strict=True):
        seen = torch.ones(int(j - i), int(n - m), dtype=torch.bool, device=q.device)
        last, left = int((n - m) - (j - i)), window_size[0]  # of the first query
        seen = seen.tril(last) if left < 0 else seen.tril(last).triu(last - left)
        out = F.scaled_dot_product_attention(
            q[i:j].transpose(0, 1)[None],
            k[m:n].transpose(0, 1)[None],
            v[m:n].transpose(0, 1)[None],
            attn_mask=seen,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
