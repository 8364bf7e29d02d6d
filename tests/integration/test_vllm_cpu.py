"""Test that what replaces vLLM's own layers on CPUs computes the same, or is left out."""

from pathlib import Path

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from lightning_rl.engines.vllm.cpu import use_cpu_kernels
from tests.support.tolerances import rounding

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM computes on the GPU")

HAS_BFLOAT16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(autouse=True)
def configured():
    with set_current_vllm_config(VllmConfig()):
        yield


def norm(width, **options):
    """Make a norm with weights away from 1."""
    layer = RMSNorm(width, eps=1e-5, **options)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2.0)
    return layer


def x(*shape, dtype=torch.float32, scale=3.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))).to(
        dtype
    )


def replaced(layer):
    """Tell whether a layer is computed otherwise than vLLM does."""
    before = layer._forward_method
    use_cpu_kernels(nn.Sequential(layer))
    return layer._forward_method != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 64, 192, 1024])
def test_norms_equal_their_formula(dtype, width):
    layer = norm(width, dtype=dtype)
    # vLLM's kernel does not round where the CPU lacks bfloat16, and is left alone.
    assert replaced(layer) or (dtype == torch.bfloat16 and not HAS_BFLOAT16)
    rows, residual = x(7, width, dtype=dtype), x(7, width, dtype=dtype, scale=5.0).flip(0)

    def formula(rows):
        rows, weight = rows.double(), layer.weight.double()
        return weight * rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    # The sum of squares is in float32; the result is rounded to dtype before and after the weight.
    bound = rounding(width) + rounding(2, dtype=dtype)
    torch.testing.assert_close(layer(rows).double(), formula(rows), rtol=bound, atol=0)
    added = rows + residual
    normed, kept = layer(rows.clone(), residual.clone())
    torch.testing.assert_close(kept, added, rtol=0, atol=0)
    torch.testing.assert_close(normed.double(), formula(added), rtol=bound, atol=0)


def test_norms_of_heads_in_a_wider_row():
    layer, row = norm(32), x(5, 3 * 4 * 32)
    keys = row[:, 128:256].view(5, 4, 32)  # as Qwen3 norms its queries and keys
    assert not keys.is_contiguous()
    expected = layer(keys)
    assert replaced(layer)
    torch.testing.assert_close(layer(keys), expected)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (5, 64), (2, 3, 64)])
def test_swiglu_is_its_formula(shape):
    layer, rows = SiluAndMul(), x(*shape)
    expected, before = SiluAndMul.forward_native(rows), rows.clone()
    assert replaced(layer)
    torch.testing.assert_close(layer(rows), expected)
    torch.testing.assert_close(rows, before, rtol=0, atol=0)


def test_weights_pushed_later_count():
    layer, rows = norm(64), x(3, 64)
    assert replaced(layer)
    before = layer(rows)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    torch.testing.assert_close(layer(rows), 2.0 * before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: norm(48),  # the kernel takes whole vectors only
        lambda: norm(64, var_hidden_size=32),
        lambda: RMSNorm(64, has_weight=False),
        lambda: GemmaRMSNorm(64),  # which scales by 1 + its weight
    ],
)
def test_other_norms_stay_vllms(make):
    assert not replaced(make())


def test_other_types_than_the_weights_stay_vllms():
    layer, rows = norm(64, dtype=torch.float32), x(3, 64, dtype=torch.bfloat16)
    expected = layer(rows)
    assert replaced(layer)
    torch.testing.assert_close(layer(rows), expected, rtol=0, atol=0)
