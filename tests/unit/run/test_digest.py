"""Test digests of tensors: what they are made of, and what they see."""

import zlib

import pytest
import torch

from lightning_rl.run import digest as module
from lightning_rl.run.digest import CHUNK, Digester, digest, digests

GOLDEN, SPREAD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def by_hand(words, dtype, shape):
    """Compute the definition in integers of Python, which have no end."""

    def signed(number):
        return (number + (1 << 63)) % (1 << 64) - (1 << 63)

    def mixed(number):
        return signed(number) ^ (signed(number) >> 29)

    def factor(place):
        first = signed(place * GOLDEN)
        return (first ^ (first >> 31)) * SPREAD | 1

    total = zlib.crc32(f"{dtype} {shape}".encode()) * GOLDEN
    for number in range(-(-len(words) // CHUNK)):
        chunk = words[number * CHUNK : (number + 1) * CHUNK]
        total += mixed(sum(mixed(w) * factor(i) for i, w in enumerate(chunk))) * (
            number * SPREAD | 1
        )
    return f"{total % (1 << 64):016x}"


def test_a_small_one_by_hand():
    # The sum of one word below 2^29 is the word alone: the first factors are 1.
    form = zlib.crc32(b"torch.int64 (1,)") * GOLDEN
    assert digest(torch.tensor([5])) == f"{(form + 5) % (1 << 64):016x}"
    # 1.0 is 0x3f800000: two words and a half, the last filled with zeros.
    words = [0x3F800000_3F800000, 0x40000000_3F800000, 0x3F800000]
    ones = torch.tensor([1.0, 1.0, 1.0, 2.0, 1.0])
    assert digest(ones) == by_hand(words, "torch.float32", (5,))


@pytest.mark.parametrize("words", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_it_is_the_definition_across_chunks(words):
    tensor = torch.randint(-(2**63), 2**63 - 1, (words,))
    assert digest(tensor) == by_hand(tensor.tolist(), "torch.int64", (words,))


@pytest.mark.parametrize("words", [0, 5, CHUNK, 3 * CHUNK + 7])
def test_a_gpus_way_gives_the_same(monkeypatch, words):
    """A GPU sums chunks many at a time, by products of other kinds."""
    tensor = torch.randint(-(2**63), 2**63 - 1, (words,))
    whole = words // CHUNK * CHUNK
    by_rows = module._weigh_rows(tensor[:whole].view(-1, CHUNK)).tolist()
    rest = module._weigh_rows(tensor[whole:][None]).tolist()
    on_cpu = Digester()._sums_of(tensor.numpy())
    assert (by_rows + rest)[: len(on_cpu)] == on_cpu
    assert (by_rows + rest)[len(on_cpu) :] in ([], [0])


def test_it_does_not_matter_how_a_tensor_lies_in_memory():
    matrix = torch.randn(37, 41)
    same = digest(matrix)
    assert digest(matrix.clone()) == same
    assert digest(matrix.t().contiguous().t()) == same
    inside = torch.zeros(38 * 41 + 1, dtype=matrix.dtype)
    inside[1 : 1 + 37 * 41] = matrix.flatten()  # four bytes off a word's beginning
    assert digest(inside[1 : 1 + 37 * 41].view(37, 41)) == same
    assert digest(torch.nn.Parameter(matrix)) == same
    with torch.inference_mode():
        assert digest(matrix) == same


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 8, 1001])
def test_every_byte_counts(dtype, count):
    tensor = torch.randn(count).to(dtype)
    same = digest(tensor)
    data = tensor.view(torch.uint8)
    for place in {0, len(data) // 2, len(data) - 1}:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert digest(tensor) != same
            data[place] ^= 1 << bit
    assert digest(tensor) == same


def changes():
    square, vector = torch.randn(64, 64), torch.linspace(-1, 1, 4096)
    yield "transposed", square, square.t()
    yield "rows swapped", square, square[[1, 0, *range(2, 64)]]
    yield "columns swapped", square, square[:, [1, 0, *range(2, 64)]]
    yield "reversed", vector, vector.flip(0)
    yield "moved by one", vector, vector.roll(1)
    yield "another shape", square, square.view(32, 128)
    yield "another shape of zeros", torch.zeros(6), torch.zeros(2, 3)
    yield "more zeros", torch.zeros(6), torch.zeros(7)
    yield "another dtype", torch.zeros(6), torch.zeros(6, dtype=torch.int32)
    yield "bits of another dtype", vector, vector.view(torch.int32)
    yield "zeros of another sign", torch.zeros(2), -torch.zeros(2)
    # The sign of every second number is a word's topmost bit, which counts modulo 2 in any sum.
    yield "every second sign", vector, vector * torch.tensor([1.0, -1.0]).repeat(2048)
    ones = torch.ones(4096)
    ones[[5, 1027]] *= -1
    yield "two signs", torch.ones(4096), ones
    yield "two signs elsewhere", ones, ones.roll(2)
    # 0 and 1 differ in seven of the upper bits alone.
    mask = torch.zeros(4096)
    mask[1::2] = torch.randint(0, 2, (2048,))
    yield "zeros and ones in other places", mask, mask.roll(2)


@pytest.mark.parametrize(("one", "other"), [pytest.param(*c[1:], id=c[0]) for c in changes()])
def test_what_is_somewhere_else_or_something_else(one, other):
    assert digest(one) != digest(other)


def test_no_swap_of_two_words_goes_unseen_within_and_across_chunks():
    words = torch.zeros(2 * CHUNK, dtype=torch.int64)
    found = set()
    for place in [0, 1, 2, 63, 64, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1]:
        for bit in range(64):
            words[place] = 1 << bit if bit < 63 else -(1 << 63)
            found.add(digest(words))
        words[place] = 0
    assert len(found) == 9 * 64


def test_names_keep_their_order_and_their_digests():
    tensors = {"b": torch.randn(300_000), "a": torch.ones(3, dtype=torch.bool), "c": torch.ones(())}
    digester = Digester()
    for name, tensor in tensors.items():
        digester.add(name, tensor)
    assert list(digester.digests().items()) == [(n, digest(t)) for n, t in tensors.items()]
    assert digests([]) == {}
