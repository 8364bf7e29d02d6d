"""64-bit digests of all bytes of a tensor, computed on the tensor's device."""

import zlib
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 17
"""Words per partial sum: 1 MiB, which fits in a CPU's caches."""
_CHUNKS_AT_ONCE = 64
"""Chunks per operation on a GPU, where each operation has a launch cost."""
_GOLDEN, _SPREAD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_ALL = (1 << 64) - 1


class Digester:
    """Digests of tensors that arrive one by one; a GPU computes one while the next is awaited.

    Tensors of equal bytes, shape and dtype have equal digests, on every device. A change within one
    8-byte word is always detected. Any other change, also of order, such as two swapped rows, goes
    undetected with probability of about 2^-64. It is no cryptographic hash: such a pair can be
    constructed on purpose; use SHA-256 against that.

    A word x is mixed, ``m(x) = x ^ (x >> 29)``, and multiplied by an odd factor of its position.
    The sum of a chunk, modulo 2^64, is mixed and multiplied likewise; the sum of those, and of a
    term for dtype and shape, is the digest. Each of these steps is invertible, so nothing of a
    single word is lost. Without the mixing a word's topmost bit, the sign of a number, would count
    modulo 2 and so look alike in all positions.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._forms: list[int] = []
        self._sums: list[Tensor | list[int]] = []
        self._buffer = np.empty(0, np.int64)  # of a CPU; to get memory takes its time

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor under a name; a sharded one is gathered, so all its ranks must call this."""
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        self._names.append(name)
        self._forms.append(zlib.crc32(f"{whole.dtype} {tuple(whole.shape)}".encode()))
        words = _words(whole.detach())
        on_cpu = words.device.type == "cpu"
        self._sums.append(self._sums_of(words.numpy()) if on_cpu else _sums_on_device(words))

    def digests(self) -> dict[str, str]:
        """Return the digests of all added tensors by name, as 16 hexadecimal digits."""
        result = {}
        for name, form, numbers in zip(self._names, self._forms, self._read(), strict=True):
            total = form * _GOLDEN
            for index, number in enumerate(numbers):
                total += (number ^ (number >> 29)) * (index * _SPREAD | 1)
            result[name] = f"{total & _ALL:016x}"
        return result

    def _read(self) -> list[list[int]]:
        """Return the chunk sums of all tensors; waits once per device."""
        sums = self._sums
        for device in {one.device for one in sums if isinstance(one, Tensor)}:
            own = [one for one in sums if isinstance(one, Tensor) and one.device == device]
            numbers = iter(torch.cat(own).tolist())
            read = {id(one): [next(numbers) for _ in range(len(one))] for one in own}
            sums = [read.get(id(one), one) for one in sums]
        return [one for one in sums if isinstance(one, list)]

    def _sums_of(self, words: np.ndarray) -> list[int]:
        """Return the sum of each chunk of words, on a CPU, using no more memory than one chunk."""
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
    """Return the digest of each tensor, as 16 hexadecimal digits; sharded tensors are gathered."""
    digester = Digester()
    for name, tensor in tensors:
        digester.add(name, tensor)
    return digester.digests()


def digest(tensor: Tensor) -> str:
    """Return the digest of one tensor, as 16 hexadecimal digits."""
    return digests([("", tensor)])[""]


def _words(tensor: Tensor) -> Tensor:
    """View the tensor's bytes as 64-bit integers."""
    flat = tensor.contiguous().view(-1)
    even = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    return flat.view(torch.int64) if even else _padded(flat)


def _padded(flat: Tensor) -> Tensor:
    """Return a copy of the bytes, padded with zeros to whole 64-bit words."""
    copy = flat.new_zeros(-(-flat.nbytes // 8) * 8, dtype=torch.uint8)
    copy[: flat.nbytes] = flat.view(torch.uint8)
    return copy.view(torch.int64)


def _sums_on_device(words: Tensor) -> Tensor:
    """Return the sum of each chunk of words, on a GPU; the last chunk may be shorter."""
    whole = len(words) // CHUNK * CHUNK
    sums = [_weigh_rows(words[whole:][None])]
    for part in words[:whole].split(CHUNK * _CHUNKS_AT_ONCE):
        sums.insert(-1, _weigh_rows(part.view(-1, CHUNK)))
    return torch.cat(sums)


def _weigh_rows(words: Tensor) -> Tensor:
    """Return the sums (R,) of chunks (R, C) on a GPU, which has no product of integer matrices."""
    mixed = (words >> 29).bitwise_xor_(words)
    return (mixed * _factors(words.device)[: words.shape[1]]).sum(1)


@cache
def _cpu_factors() -> np.ndarray:
    return _factors(torch.device("cpu")).numpy()


@cache
def _factors(device: torch.device) -> Tensor:
    """Return a factor for each position in a chunk: all are odd, the first is 1, and the others
    look random.
    """
    golden, spread = (constant - (1 << 64) for constant in (_GOLDEN, _SPREAD))
    with torch.inference_mode(False):
        places = torch.arange(CHUNK, device=device) * golden
        return (places ^ (places >> 31)) * spread | 1
