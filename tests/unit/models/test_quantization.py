"""Test weights in few bits: the numbers they stand for, from their definitions in float64."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_rl import NF4, Int8
from lightning_rl.errors import ConfigError
from lightning_rl.models.quantized_layers import QuantizedLinear

# Dettmers et al. 2023, arXiv:2305.14314, appendix E.
LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], dtype=torch.double)  # fmt: skip
EPS = torch.finfo(torch.float32).eps
FORMS = [NF4(), NF4(block_size=128, double=False), Int8()]


def normal(*shape, seed=0):
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unpacked(form, weight, dtype=torch.float32):
    return form.unpack(form.pack(weight), weight.shape, dtype)


def linear(rows=48, columns=64, bias=True):
    layer = nn.Linear(columns, rows, bias=bias)
    layer.weight.data = normal(rows, columns)
    return layer


def plain_like(layer):
    """Return a plain layer with the weight that a quantised one stands for."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight = nn.Parameter(layer.weight, requires_grad=False)
    plain.bias = layer.bias
    return plain


# -------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (NF4(double=False), (96, 64)),
        (NF4(double=False), (10, 100)),  # blocks that end in other rows than they begin
        (NF4(block_size=32, double=False), (8, 64)),
    ],
)
def test_nf4_is_the_nearest_level_of_each_block(form, shape):
    weight = normal(*shape)
    blocks = [b.double() for b in weight.flatten().split(form.block_size)]
    found = [b.double() for b in unpacked(form, weight).flatten().split(form.block_size)]
    for block, ours in zip(blocks, found, strict=True):
        largest = block.abs().max()
        distances = (block / largest)[:, None] - LEVELS
        nearest = distances.abs().min(1)
        chosen = ((ours / largest)[:, None] - LEVELS).abs().min(1)
        assert chosen.values.max() < 4 * EPS  # a level times the scale
        # The nearest; of two as near, either.
        excess = distances.gather(1, chosen.indices[:, None]).abs().squeeze(1) - nearest.values
        assert excess.max() < 4 * EPS
        assert len(chosen.indices.unique()) > 8


def test_double_quantisation_moves_scales_by_what_8_bits_lack():
    weight = normal(256, 128)
    scales = weight.view(-1, 64).abs().amax(1).double()
    found = unpacked(NF4(), weight).view(-1, 64)
    single = unpacked(NF4(double=False), weight).view(-1, 64)
    own = found.abs().amax(1).double()  # of the weight whose level is 1 or -1
    # The 8-bit numbers are farthest apart near 1: by 0.9 / 64, so one is at most half of it off.
    most = 0.9 / 128 * (scales - scales.mean()).abs().view(-1, 256).amax(1)
    off = (own - scales).abs().view(-1, 256).amax(1)
    assert (off <= most + 1e-7).all()
    assert (off > most / 10).all()
    levels = (found.double() / own[:, None]) - single.double() / scales[:, None]
    assert levels.abs().max() < 4 * EPS  # the same levels


def test_int8_is_the_nearest_of_255_numbers_in_each_row():
    weight = normal(48, 100)
    weight[3] *= 1000
    found, steps = unpacked(Int8(), weight).double(), weight.double().abs().amax(1) / 127
    counts = found / steps[:, None]
    assert (counts - counts.round()).abs().max() < 127 * 4 * EPS
    assert ((found - weight.double()).abs() / steps[:, None]).max() <= 0.5 + 127 * 4 * EPS
    assert counts.abs().max().round() == 127


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zero(form):
    weight = normal(6, 128)
    weight[2:4] = 0
    assert unpacked(form, weight)[2:4].eq(0).all()
    assert unpacked(form, torch.zeros(4, 128)).eq(0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_rounds_once(form, dtype):
    """Trainer and engine therefore agree, whichever of them casts."""
    parts = form.pack(normal(64, 192))
    whole = form.unpack(parts, (64, 192), torch.float32)
    assert torch.equal(form.unpack(parts, (64, 192), dtype), whole.to(dtype))


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (NF4(), 4 + 8 / 64 + 32 / 64 / 256),
        (NF4(double=False), 4 + 32 / 64),
        (NF4(block_size=256, double=False), 4 + 32 / 256),
        (Int8(), 8 + 32 / 512),
    ],
)
def test_bits_per_weight(form, bits):
    parts = form.pack(normal(512, 512))
    size = 8 * sum(part.nbytes for part in parts.values()) / 512**2
    assert size == pytest.approx(bits, abs=32 / 512**2)  # but for the offset of all scales


def test_without_bitsandbytes_nf4_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'bitsandbytes.*or choose Int8"):
        NF4()
    Int8()


def test_another_block_size_is_refused():
    with pytest.raises(ConfigError, match=r"NF4.block_size=48 must be one of 32, 64, 128"):
        NF4(block_size=48)


# -------------------------------------------------------------------- layers


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_a_layer_computes_as_a_plain_one_with_its_weight(form, bias, mode):
    layer = QuantizedLinear(linear(bias=bias), form)
    if mode == "bfloat16":
        layer.bfloat16()
    plain = plain_like(layer)
    found = []
    for each in (layer, plain):
        x = normal(2, 7, 64, seed=1).to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            y = each(x)
        y.float().pow(2).sum().backward()
        found.append((y, x.grad, None if each.bias is None else each.bias.grad))
        each.zero_grad()
    (y, of_x, of_bias), (plain_y, plain_of_x, plain_of_bias) = found
    assert y.dtype == plain_y.dtype
    assert torch.equal(y, plain_y)
    assert of_x.dtype == plain_of_x.dtype
    assert torch.equal(of_x, plain_of_x)
    if bias:
        torch.testing.assert_close(
            of_bias, plain_of_bias, rtol=1e-5 if y.dtype == torch.float32 else 1e-2, atol=1e-6
        )
    assert not torch.equal(linear(bias=bias)(normal(2, 7, 64)), layer.float()(normal(2, 7, 64)))


@pytest.mark.parametrize("form", FORMS)
def test_a_cast_leaves_what_the_weight_is_made_of(form):
    layer = QuantizedLinear(linear(), form)
    weight, state = layer.weight, {n: t.clone() for n, t in layer.state_dict().items()}
    layer.bfloat16()
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight, weight.bfloat16())
    layer.float()
    assert torch.equal(layer.weight, weight)
    for name, part in layer.state_dict().items():
        assert name == "bias" or torch.equal(part, state[name])
    assert torch.equal(layer.double().weight, weight.double())


@pytest.mark.parametrize("form", FORMS)
def test_a_backward_pass_keeps_no_weight(form):
    kept = []

    def note(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    layer = QuantizedLinear(linear(rows=48, columns=96, bias=False), form)
    x = normal(5, 96).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        layer(x)
        assert not kept
        plain_like(layer)(x)
        assert (48, 96) in kept or (96, 48) in kept


@pytest.mark.parametrize("form", FORMS)
def test_shapes_alone_are_those_of_the_weights(form):
    layer = QuantizedLinear(linear(), form)
    with torch.device("meta"):
        shapes = QuantizedLinear(nn.Linear(64, 48), form)
    for name, part in layer.state_dict().items():
        other = shapes.state_dict()[name]
        assert (other.shape, other.dtype) == (part.shape, part.dtype), name


def test_a_kernel_that_nobody_uses_is_not_warned_of():
    code = (
        "import lightning_rl.models.pretrained, logging\n"
        "logger = logging.getLogger('bitsandbytes.backends.cpu.ops')\n"
        "logger.warning('Failed to load CPU gemm_4bit_forward: %s', 'no kernels')\n"
        "logger.warning('another')\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "another" in said.stderr
    assert "gemm_4bit_forward" not in said.stderr
