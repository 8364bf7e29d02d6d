"""Digests of tensors: 64 bits of all their bytes, taken where the tensor is."""

import zlib
from collections.abc import Iterable, Iterator
from functools import cache

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
        self._sums: list[Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.int64)  # of a CPU; to get memory takes its time

    def add(self, name: str, tensor: Tensor) -> None:
        """Read a tensor; a sharded one is gathered, for which all its ranks have to call this."""
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        self._names.append(name)
        self._forms.append(zlib.crc32(f"{whole.dtype} {tuple(whole.shape)}".encode()))
        self._sums.append(self._chunk_sums(_words(whole.detach())))

    def digests(self) -> dict[str, str]:
        """By name, as 16 hexadecimal digits, of all that was read."""
        counts = [len(sums) for sums in self._sums]
        by_device: dict[torch.device, Iterator[int]] = {}
        for device in {sums.device for sums in self._sums}:  # wait for each once
            own = [sums for sums in self._sums if sums.device == device]
            by_device[device] = iter(torch.cat(own).tolist())
        found = {}
        for name, form, sums, count in zip(
            self._names, self._forms, self._sums, counts, strict=True
        ):
            numbers = by_device[sums.device]
            total = form * _GOLDEN
            for place in range(count):
                number = next(numbers)
                total += (number ^ (number >> 29)) * (place * _SPREAD | 1)
            found[name] = f"{total & _ALL:016x}"
        return found

    def _chunk_sums(self, words: Tensor) -> Tensor:
        """The sum of each chunk of words, on their device; the last may be shorter."""
        if words.device.type == "cpu":
            if len(self._buffer) < min(CHUNK, len(words)):
                self._buffer = words.new_empty(CHUNK)
            if len(words) <= CHUNK:  # most tensors of a small model, whose calls are what costs
                return _weigh(words, self._buffer)[None]
            return torch.stack([_weigh(part, self._buffer) for part in words.split(CHUNK)])
        whole = len(words) // CHUNK * CHUNK
        sums = [_weigh_rows(words[whole:][None])]
        for part in words[:whole].split(CHUNK * _CHUNKS_AT_ONCE):
            sums.insert(-1, _weigh_rows(part.view(-1, CHUNK)))
        return torch.cat(sums)


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


def _weigh(words: Tensor, buffer: Tensor) -> Tensor:
    """The sum of at most a chunk, on a CPU: with no more memory than ``buffer``."""
    mixed = torch.bitwise_right_shift(words, 29, out=buffer[: len(words)]).bitwise_xor_(words)
    return torch.dot(mixed, _factors(words.device)[: len(words)])


def _weigh_rows(words: Tensor) -> Tensor:
    """The sums (R,) of chunks (R, C), on a GPU, which has no products of integer matrices."""
    mixed = (words >> 29).bitwise_xor_(words)
    return (mixed * _factors(words.device)[: words.shape[1]]).sum(1)


@cache
def _factors(device: torch.device) -> Tensor:
    """Of the places in a chunk: odd; the first is 1, and the others look like random numbers."""
    golden, spread = (constant - (1 << 64) for constant in (_GOLDEN, _SPREAD))
    with torch.inference_mode(False):
        places = torch.arange(CHUNK, device=device) * golden
        return (places ^ (places >> 31)) * spread | 1
