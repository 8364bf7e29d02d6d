"""Patches for vLLM on CPUs: faster kernels, and random numbers from a generator of its own."""

from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def skip_rank_compilation() -> None:
    """Replace one function that vLLM compiles for 2-10 s on first use; same result, eager."""
    import vllm.v1.sample.sampler as sampler

    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)


@cache
def keep_global_randomness() -> None:
    """Let vLLM's CPU sampler draw from its own generator instead of the global one.

    For each token it draws from the global generator, and then again from the request's. Other
    threads may use the global one at the same time, so restoring its state would undo their draws.
    """
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    # Since 0.32 vLLM hashes a seed per token; before, it drew noise for the whole vocabulary.
    hashes = hasattr(torch.ops._C, "fused_gumbel_argmax")
    replace = _draw_seeds if hashes else _draw_noise
    replace(sampler, torch.Generator())


def _draw_seeds(sampler: Any, own: torch.Generator) -> None:
    """Patch vLLM 0.32. It also sets a step's seeds in one assignment instead of one per request."""
    forward_cpu = sampler.TopKTopPSampler.forward_cpu
    torch_for_sampler: Any = ModuleType("torch")
    torch_for_sampler.__dict__.update(vars(torch))

    def forward(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], *limits: Any
    ) -> Any:
        if self.use_fp64_gumbel:  # draws otherwise
            return forward_cpu(self, logits, generators, *limits)
        seeds = torch.randint(0, 2**31, (len(logits),), generator=own)
        drawn = [int(torch.randint(0, 2**31, (), generator=g)) for g in generators.values()]
        seeds[list(generators)] = torch.tensor(drawn, dtype=torch.long)
        torch_for_sampler.randint = lambda *args, **options: seeds
        return forward_cpu(self, logits, {}, *limits)

    sampler.torch = torch_for_sampler
    sampler.TopKTopPSampler.forward_cpu = forward


def _draw_noise(sampler: Any, own: torch.Generator) -> None:
    """Patch vLLM before 0.32."""
    forward_cpu = sampler.TopKTopPSampler.forward_cpu

    def forward(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], *limits: Any
    ) -> Any:
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":  # not ours
            return forward_cpu(self, logits, generators, *limits)
        logits = sampler.apply_top_k_top_p(logits, *limits)
        probs = logits.softmax(-1, dtype=torch.float32)
        noise = torch.empty_like(probs).exponential_(generator=own)
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        return sampler.sample_with_exponential_noise(probs, noise), logprobs

    sampler.TopKTopPSampler.forward_cpu = forward


@cache
def pack_pushed_experts() -> None:
    """Have vLLM pack pushed experts, as it packs those that it starts with.

    Its CPU kernel reads packed experts. vLLM 0.32 packs them only when it creates the kernel, and
    leaves pushed ones unpacked: every later token would be noise.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(self: Any, layer: nn.Module, w13: Tensor, w2: Tensor) -> None:
        packs = self.moe_kernel is None
        set_up(self, layer, w13, w2)
        if not packs:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack


def use_cpu_kernels(model: nn.Module) -> None:
    """Let norms and SwiGLU make fewer passes over memory; results are equal up to rounding.

    vLLM has a C++ norm for CPUs, but uses PyTorch operations there; together they take a twelfth of
    the CPU seconds of a small model. This is set on each layer, not for all models of the process.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    layer: Any
    for layer in model.modules():
        if type(layer) is RMSNorm and _has_kernel(layer):
            layer._forward_method = partial(_rms_norm, layer)
        elif type(layer) is SiluAndMul:
            layer._forward_method = _silu_and_mul


def _has_kernel(norm: Any) -> bool:
    # It takes whole vectors of 32 elements, weights in the type of what they scale, and all of it.
    fits = norm.has_weight and norm.variance_size_override is None and norm.hidden_size % 32 == 0
    return fits and _rounds_to_nearest(norm.weight.dtype)


@cache
def _rounds_to_nearest(dtype: torch.dtype) -> bool:
    """Return True if the kernel rounds to nearest; on CPUs without bfloat16 it truncates."""
    x, residual, weight = (torch.full((1, 32), value, dtype=dtype) for value in (1.0, 0.0137, 1.0))
    expected = x + residual
    torch.ops._C.fused_add_rms_norm(x, residual, weight[0], 1e-6)
    return torch.equal(residual, expected)


def _rms_norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if x.dtype != norm.weight.dtype:
        return norm.forward_native(x, residual)
    x = x.contiguous()
    if residual is None:
        normed = torch.empty_like(x)
        torch.ops._C.rms_norm(normed, x, norm.weight.data, norm.variance_epsilon)
        return normed
    residual = residual.contiguous()
    # A norm with a residual may write over both.
    torch.ops._C.fused_add_rms_norm(x, residual, norm.weight.data, norm.variance_epsilon)
    return x, residual


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return nn.functional.silu(gate).mul_(up)
