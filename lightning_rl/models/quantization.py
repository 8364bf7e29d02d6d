"""Quantisation of weights that are never trained: the frozen base of a LoRA (QLoRA).

Trainer and engine agree to the bit if both compute with the same numbers. So weights are only
stored in few bits: they are unpacked for computing, and engines are sent the unpacked weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError

Parts = Mapping[str, Tensor]


class Quantization(ABC):
    """A format that stores frozen weights in few bits.

    Parts are integers, with the bits of float32 numbers in int32: casting a model to another dtype
    (``precision: bf16-true``) casts all floats, and rounded scales would change the weights.
    """

    @abstractmethod
    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts, none of them a scalar, that represent a float32 weight (out, in)."""

    @abstractmethod
    def unpack(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) of these parts: computed in float32, then rounded once."""


@configurable
@dataclass(frozen=True)
class NF4(Quantization):
    """4-bit NormalFloat, the format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

    Each weight is one of 16 quantiles of a normal distribution times the largest absolute value of
    its block: 4.13 bits per weight, 4.5 without double quantisation.

    bitsandbytes computes it, with kernels for CPUs and for CUDA. torchao 0.18 has NF4 for CUDA and
    CPUs too, but in a file that calls itself temporary, and its weights are tensors of a class of
    their own, which ``weights_only`` checkpoints, digests and FSDP2 each would have to know of.

    Args:
        block_size: consecutive weights that share a scale: 32, 64, 128, 256, 512 or 1024.
        double: keep scales in 8 bits too, 256 of them with a scale of their own.

    Raises:
        ConfigError: for another ``block_size``, or without bitsandbytes.
    """

    block_size: int = 64
    double: bool = True

    def __post_init__(self) -> None:
        if find_spec("bitsandbytes") is None:
            raise ConfigError(
                "NF4 needs bitsandbytes: `pip install 'bitsandbytes>=0.50'`, or choose Int8, which "
                "needs nothing"
            )
        if self.block_size not in _BLOCKS:
            raise ConfigError(
                f"NF4.block_size={self.block_size} must be one of {', '.join(map(str, _BLOCKS))}"
            )

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        bnb = bitsandbytes()
        codes, state = bnb.quantize_4bit(
            weight.contiguous(), blocksize=self.block_size, quant_type="nf4"
        )
        parts = {"codes": codes.view(-1)}
        if not self.double:
            return parts | {"scales": state.absmax.view(torch.int32)}
        offset = state.absmax.mean(0, keepdim=True)  # scales are all positive, 8 bits have a sign
        scales, nested = bnb.quantize_blockwise(state.absmax - offset, blocksize=_SCALES)
        return parts | {
            "scales": scales,
            "scales_of_scales": nested.absmax.view(torch.int32),
            "offset": offset.view(torch.int32),
        }

    def unpack(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        bnb, scales = bitsandbytes(), parts["scales"]
        if self.double:
            nested = parts["scales_of_scales"].view(torch.float32)
            scales = bnb.dequantize_blockwise(scales, absmax=nested, blocksize=_SCALES)
            scales = scales + parts["offset"].view(torch.float32)
        else:
            scales = scales.view(torch.float32)
        own = dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
        state = bnb.QuantState(
            scales, shape, blocksize=self.block_size, quant_type="nf4", dtype=own
        )
        weight: Tensor = bnb.dequantize_4bit(parts["codes"], state)
        return weight.to(dtype)


_BLOCKS = (32, 64, 128, 256, 512, 1024)
_SCALES = 256
"""Number of scales that share one scale."""


@configurable
@dataclass(frozen=True)
class Int8(Quantization):
    """8-bit integers, a scale for each output: the weights of LLM.int8() (Dettmers et al. 2022).

    8 bits per weight, and 32 per row. Unlike in LLM.int8(), activations are not rounded.
    """

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        # Of a row of zeros: any scale will do but zero.
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"codes": codes, "scales": scales.view(torch.int32)}

    def unpack(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return (parts["codes"] * parts["scales"].view(torch.float32)[:, None]).to(dtype)


@cache
def bitsandbytes() -> Any:
    """Return the functions of bitsandbytes, imported late because that takes seconds."""
    from bitsandbytes import functional

    return functional
