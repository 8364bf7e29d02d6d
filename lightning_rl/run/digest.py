"""Digests of tensors: 64 bits of all their bytes, taken where the tensor is."""

import zlib
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 17
"""Words that make a sum of their own: 1 MiB, which the caches of a CPU hold."""
_CHUNKS_AT_ONCE = 64
"""On a GPU, which has to be told of every operation."""
_GOLDEN, _SPREAD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_ALL = (1 << 64) - 1


class Digester:
    """Digests of tensors that come one by one; a GPU goes on with one while the next is awaited.

    Tensors of equal bytes, shape and dtype have equal digests, on every device. A change within one
    8-byte word is always seen. Any other, also one of places, such as two rows swapped, goes unseen
    with a chance of about 2^-64; but whoever wants to can make such a pair: for that take SHA-256.

    A word x is mixed, ``m(x) = x ^ (x >> 29)``, and multiplied by an odd factor of its place. The
    sum of a chunk of them, modulo 2^64, is mixed and multiplied likewise; the sum of those, and of
    what stands for dtype and shape, is the digest. All of that can be undone, so that nothing of a
    single word is lost. Without the mixing a word's topmost bit, the sign of a number, would count
    modulo 2 and so look alike in all places.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._forms: list[int] = []
        self._sums: list[Tensor | list[int]] = []
        self._buffer = np.empty(0, np.int64)  # of a CPU; to get memory takes its time

    def add(self, name: str, tensor: Tensor) -> None:
        """Read a tensor; a sharded one is gathered, for which all its ranks have to call this."""
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        self._names.append(name)
        self._forms.append(zlib.crc32(f"{whole.dtype} {tuple(whole.shape)}".encode()))
        words = _words(whole.detach())
        on_cpu = words.device.type == "cpu"
        self._sums.append(self._sums_of(words.numpy()) if on_cpu else _sums_on_device(words))

    def digests(self) -> dict[str, str]:
        """By name, as 16 hexadecimal digits, of all that was read."""
        found = {}
        for name, form, numbers in zip(self._names, self._forms, self._read(), strict=True):
            total = form * _GOLDEN
            for place, number in enumerate(numbers):
                total += (number ^ (number >> 29)) * (place * _SPREAD | 1)
            found[name] = f"{total & _ALL:016x}"
        return found

    def _read(self) -> list[list[int]]:
        """The sums of all tensors; each device is waited for once."""
        sums = self._sums
        for device in {one.device for one in sums if isinstance(one, Tensor)}:
            own = [one for one in sums if isinstance(one, Tensor) and one.device == device]
            numbers = iter(torch.cat(own).tolist())
            read = {id(one): [next(numbers) for _ in range(len(one))] for one in own}
            sums = [read.get(id(one), one) for one in sums]
        return [one for one in sums if isinstance(one, list)]

    def _sums_of(self, words: np.ndarray) -> list[int]:
        """The sum of each chunk of words, on a CPU, with no more memory than one chunk takes."""
        if len(self._buffer) < min(CHUNK, len(words)):
            self._buffer = np.empty(min(CHUNK, 2 * len(words)), np.int64)
        sums = []
        for start in range(0, max(1, len(words)), CHUNK):
            part = words[start : start + CHUNK]
            mixed = np.right_shift(part, 29, out=self._buffer[: len(part)])
            np.bitwise_xor(mixed, part, out=mixed)
            # Product and sum apart: vectors of 64-bit integers have no dot product of their own.
            np.multiply(mixed, _cpu_factors()[: len(part)], out=mixed)
            sums.append(int(mixed.sum()))
        return sums


def digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digest of each tensor, as 16 hexadecimal digits; sharded ones are gathered."""
    digester = Digester()
    for name, tensor in tensors:
        digester.add(name, tensor)
    return digester.digests()


def digest(tensor: Tensor) -> str:
    """The digest of one tensor."""
    return digests([("", tensor)])[""]


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as 64-bit integers."""
    flat = tensor.contiguous().view(-1)
    even = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    return flat.view(torch.int64) if even else _padded(flat)


def _padded(flat: Tensor) -> Tensor:
    """A copy whose bytes are whole words, with zeros at the end."""
    copy = flat.new_zeros(-(-flat.nbytes // 8) * 8, dtype=torch.uint8)
    copy[: flat.nbytes] = flat.view(torch.uint8)
    return copy.view(torch.int64)


def _sums_on_device(words: Tensor) -> Tensor:
    """The sum of each chunk of words, on a GPU; the last may be shorter."""
    whole = len(words) // CHUNK * CHUNK
    sums = [_weigh_rows(words[whole:][None])]
    for part in words[:whole].split(CHUNK * _CHUNKS_AT_ONCE):
        sums.insert(-1, _weigh_rows(part.view(-1, CHUNK)))
    return torch.cat(sums)


def _weigh_rows(words: Tensor) -> Tensor:
    """The sums (R,) of chunks (R, C), on a GPU, which has no products of integer matrices."""
    mixed = (words >> 29).bitwise_xor_(words)
    return (mixed * _factors(words.device)[: words.shape[1]]).sum(1)


@cache
def _cpu_factors() -> np.ndarray:
    return _factors(torch.device("cpu")).numpy()


@cache
def _factors(device: torch.device) -> Tensor:
    """Of the places in a chunk: odd; the first is 1, and the others look like random numbers."""
    golden, spread = (constant - (1 << 64) for constant in (_GOLDEN, _SPREAD))
    with torch.inference_mode(False):
        places = torch.arange(CHUNK, device=device) * golden
        return (places ^ (places >> 31)) * spread | 1
