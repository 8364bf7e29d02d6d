"""Random choices that are a function of a seed, the same for numbers and for tensors of them."""

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def drawn(seed: Tensor | int, count: int) -> Tensor:
    """Return the number in [0, ``count``) that a seed (*B,) maps to; it is uniform over seeds.

    It is the first number of SplitMix64 (Steele et al. 2014), without its highest bit, modulo
    ``count``.
    """
    mixed = torch.as_tensor(seed) + _signed(_GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    mixed = mixed ^ _shifted(mixed, 31)
    return (mixed & (2**63 - 1)) % count


def _signed(number: int) -> int:
    """Return the int64 with the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros from the left."""
    return (number >> bits) & (2 ** (64 - bits) - 1)
