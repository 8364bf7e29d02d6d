"""Check attention over micro-batches and the policy head, by themselves."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import begin_peak, milliseconds, peak_bytes
from benchmarks.gpu.made import rollouts_of, shape_of
from lightning_rl.extend import pack_rollouts
from lightning_rl.models import heads
from lightning_rl.models.attention.packed import PackLayout, build_layout, packed_attention
from lightning_rl.models.attention.varlen import attend, kernel_works, plain_varlen
from tests.support.places import attended_in_places

HEADS = ((14, 2, 64), (12, 2, 128), (8, 8, 64), (8, 1, 256))
"""Query heads, key heads and their width: of 0.5B and 1.5B models, ungrouped, and the extremes."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""The tolerance of norms: some roundings of each format; a wrong mask is off by 0.1 and more."""


def attention(bench: Bench) -> None:
    """Compare outputs and gradients of packed attention with its definition in float32.

    Without a sliding window, and through one of a third of the longest rollout.
    """
    sizes = ((3, 40, 30), (4, 7, 1)) if bench.tiny else ((16, 300, 200), (4, 1500, 64), (4, 64, 1))
    for width in HEADS[:2] if bench.tiny else HEADS:
        for dtype in TOLERANCE:
            for count, tokens, prompt in sizes:
                queries, keys, size = width
                name = f"{queries}/{keys}x{size} {str(dtype)[6:]} {count}x{prompt}+{tokens}"
                layout = build_layout(
                    pack_rollouts(rollouts_of(count, tokens, prompt, group_size=2)).to(bench.device)
                )
                for window in (None, (tokens + prompt) // 3):
                    with bench.case(through := name if window is None else f"{name} w{window}"):
                        attended = partial(_packed, window=window)
                        _compare(bench, through, layout, width, dtype, attended, window)


def shared_queries(bench: Bench) -> None:
    """Measure ``attention`` in several places, each with a share of the queries."""
    sizes = ((3, 40, 30),) if bench.tiny else ((16, 300, 200), (2, 8000, 64))
    for places in (2, 8):
        for dtype in TOLERANCE:
            for count, tokens, prompt in sizes:
                name = f"{places} places {str(dtype)[6:]} {count}x{prompt}+{tokens}"
                layout = build_layout(
                    pack_rollouts(rollouts_of(count, tokens, prompt, group_size=2)).to(bench.device)
                )
                with bench.case(name):
                    attended = partial(attended_in_places, places=places)
                    _compare(bench, name, layout, HEADS[0], dtype, attended)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, window: int | None
) -> Tensor:
    options: dict[str, Any] = {"layout": layout, "sliding_window": window}
    return packed_attention(nn.Identity(), query, key, value, None, **options)[0]


def _compare(
    bench: Bench,
    name: str,
    layout: PackLayout,
    width: tuple[int, int, int],
    dtype: torch.dtype,
    attended: Callable[[Tensor, Tensor, Tensor, PackLayout], Tensor],
    window: int | None = None,
) -> None:
    queries, keys, size = width
    tokens = len(layout.input_ids)
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, n, tokens, size, device=bench.device).to(dtype).requires_grad_()
        for n in (queries, keys, keys)
    ]
    upstream = torch.randn(1, tokens, queries, size, device=bench.device).to(dtype)
    kind = size, window is not None
    if bench.device == "cuda" and dtype != torch.float32:
        works = kernel_works(torch.device("cuda"), dtype, *kind)
        bench.require(works, f"{name}: the fused kernel is not used")
        layout.fuse(dtype, frozenset({kind} if works else ()))
    fused = layout.fused is not None

    def ours() -> list[Tensor]:
        query, key, value = inputs
        out = attended(query, key, value, layout)
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    exact = [x.detach().float().requires_grad_() for x in inputs]
    errors = {
        what: float((a.detach().float() - b.detach()).norm() / b.detach().norm())
        for what, a, b in zip(
            ("out", "dq", "dk", "dv"),
            ours(),
            _defined(exact, layout, upstream.float(), window),
            strict=True,
        )
    }
    milli = milliseconds(bench, ours, repeats=2 if bench.tiny else 5)
    bench.note({name: {"fused": fused, "ms": milli} | errors})
    worst, bound = max(errors.values()), TOLERANCE[dtype]
    bench.require(worst < bound, f"{name}: off by {worst:.2g} of its norm, above {bound:g}")


def _defined(
    inputs: list[Tensor], layout: PackLayout, upstream: Tensor, window: int | None
) -> list[Tensor]:
    """Return output and gradients, segment by segment in float32."""
    q, k, v = (x[0].transpose(0, 1) for x in inputs)
    out = attend(q, k, v, layout.varlen, None, plain_varlen, window)
    return [out[None], *torch.autograd.grad(out, inputs, upstream[0])]


def head_chunks(bench: Bench) -> None:
    """Time and memory of the policy head by the size of its chunks, with a frozen head too."""
    shape = shape_of(bench, "0.5B")
    tokens = 64 if bench.tiny else 16_000
    output = nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=bench.device)
    hidden = torch.randn(tokens, shape.hidden, device=bench.device, requires_grad=True)
    targets = torch.randint(shape.vocabulary, (tokens,), device=bench.device)
    temperature = torch.ones(tokens, device=bench.device)
    losses = {}

    def work() -> Tensor:
        hidden.grad = output.weight.grad = None
        with torch.autocast(bench.device, torch.bfloat16):
            logprobs, _ = heads.token_logprobs(hidden, output, targets, temperature)
        logprobs.mean().backward()
        return logprobs.detach().mean()

    for trained in (True, False):
        output.requires_grad_(trained)
        for bits in (11, 13) if bench.tiny else range(24, 29):
            name = f"2^{bits}{'' if trained else ' frozen'}"
            size = patch.object(heads, "chunk_elements", lambda _, bits=bits: 1 << bits)
            with bench.case(name), size:
                begin_peak(bench)
                losses[name] = float(work())
                peak = peak_bytes(bench)
                found = {"ms": milliseconds(bench, work, 3)}
                bench.note({name: found if peak is None else found | {"peak GiB": peak / 2**30}})
    apart = max(losses.values()) - min(losses.values())
    bench.require(apart < 1e-3, f"mean logprobs differ by {apart:.2g} with the chunks' size")
