"""Test what a micro-batch's layout costs, and long completions, whose attention needs no mask."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.attention import (
    batches as attention_batches,
    short_segments as short_attention,
)
from lightning_rl.models.attention.packed import build_layout, packed_attention
from lightning_rl.models.attention.varlen import attend, plain_varlen


class Cost(TorchDispatchMode):
    """Counts operations, and the bytes that they fill."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.bytes += result.untyped_storage().nbytes()
        return result


def cost_of(micro_batch, *used: str) -> tuple[int, int]:
    with Cost() as cost:
        layout = build_layout(micro_batch)
        for name in used:
            getattr(layout, name)
    return cost.operations, cost.bytes


@pytest.mark.parametrize("used", [(), ("varlen",), ("batches",)])
@pytest.mark.parametrize("group_size", [1, 2])
def test_a_layout_is_linear_in_the_tokens(make_rollout, used, group_size):
    """One long rollout and two that share a prompt: a mask alone had L (P + L) bytes."""

    def micro_batch(tokens: int):
        prompt, completion = [3] * (tokens // 4), [4] * (tokens * 3 // 4)
        return pack_rollouts([make_rollout(prompt, completion)] * group_size)

    (operations, size), (more_operations, twice) = (
        cost_of(micro_batch(n), *used) for n in (4096, 8192)
    )
    assert more_operations == operations <= 180
    assert twice <= 2.05 * size
    assert twice <= 450 * group_size * 8192  # its mask would take 8192 * 6144 = 6000 a token


@pytest.mark.parametrize("used", ["varlen", "batches"])
def test_what_is_not_used_is_not_built(random_batch, used):
    layout = build_layout(random_batch(1))
    assert not {"varlen", "batches"} & set(vars(layout))
    if used == "batches":
        q, k = torch.zeros(1, 4, len(layout.input_ids), 8), torch.zeros(1, 2, 1, 8)
        k = k.expand(1, 2, q.shape[2], 8)
        packed_attention(torch.nn.Identity(), q, k, k, None, layout=layout)
    else:
        assert layout.varlen.longest_key
    assert {"varlen", "batches"} & set(vars(layout)) == {used}


def attention(layout, fused: bool, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    """Return outputs and gradients, in float64; values are narrower than keys, as DeepSeek's."""
    size, generator = len(layout.input_ids), torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, *shape, generator=generator, dtype=torch.double, requires_grad=True)
        for shape in ((heads, size, 8), (kv_heads, size, 8), (kv_heads, size, 5))
    )
    if fused:
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        out = attend(*rows, layout.varlen, 0.3, plain_varlen)[None]
    else:
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, layout=layout, scaling=0.3)
    towards = torch.randn(out.shape, generator=generator, dtype=torch.double)
    return [out, *torch.autograd.grad((out * towards).sum(), (q, k, v))]


@pytest.mark.parametrize("most", [0, 20, 60])
@pytest.mark.parametrize("seed", range(3))
def test_whole_rollouts_are_attended_as_masked_ones(monkeypatch, random_batch, seed, most):
    monkeypatch.setattr(attention_batches, "MAX_MASK", most)
    layout = build_layout(random_batch(seed, groups=5))
    masked = sum(bucket.mask is not None for bucket in layout.batches.parts)
    slots = torch.cat([bucket.query.flatten() for bucket in layout.batches.parts])
    monkeypatch.setattr(attention_batches, "MAX_MASK", 10**9)
    plain = attention_batches.batch_segments(layout.segments)
    before = torch.cat([bucket.query.flatten() for bucket in plain.parts])
    assert len(slots) != len(before)  # some do run whole
    assert masked <= sum(bucket.mask is not None for bucket in plain.parts)
    for ours, theirs in zip(attention(layout, False), attention(layout, True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("most_mask", [20, 10**9])
@pytest.mark.parametrize("seed", range(3))
def test_short_segments_are_attended_as_long_ones(monkeypatch, random_batch, seed, most_mask):
    """Segments have masks or none, and three query heads share a key head or none does."""
    monkeypatch.setattr(attention_batches, "MAX_MASK", most_mask)
    batch = random_batch(seed, groups=5)

    def computed(most: int) -> tuple[list[torch.Tensor], int]:
        monkeypatch.setattr(short_attention, "MOST_KEYS", most)
        results, prepared = [], 0
        for heads in ((4, 2), (3, 3), (6, 2)):
            layout = build_layout(batch)
            results += attention(layout, False, *heads)
            prepared += sum(len(part.prepared) for part in layout.batches.parts)
        return results, prepared

    short, used = computed(64)
    fused, unused = computed(0)
    assert (used > 0, unused) == (True, 0)
    for ours, theirs in zip(short, fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class OneMessage:
    """Sends keys and values together, as ranks exchange tokens, and so with one width."""

    def gather_tokens(self, q, k, v):
        found = torch.cat([k, v], 1)
        return q, *found.split([k.shape[1], v.shape[1]], 1)

    def gather_heads(self, output):
        return output


def test_narrow_values_are_exchanged_with_their_keys(random_batch):
    layout = build_layout(random_batch(0))
    alone = attention(layout, False)
    layout.exchange = OneMessage()
    for ours, theirs in zip(attention(layout, False), alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("queries", "keys", "repeats", "dtype", "short"),
    [
        (7, 14, 3, torch.float32, True),
        (27, 37, 3, torch.float64, True),  # 2,997 scores
        (28, 37, 3, torch.float32, False),
        (1, 65, 1, torch.float32, False),
        (7, 14, 3, torch.bfloat16, False),
    ],
)
def test_which_segments_are_short_by_hand(queries, keys, repeats, dtype, short):
    batch = attention_batches.AttentionBatch(
        torch.zeros(2, queries, dtype=torch.long), torch.zeros(2, keys, dtype=torch.long), None
    )
    assert short_attention.is_short(batch, torch.zeros(1, dtype=dtype), repeats) == short


def test_which_rollouts_run_whole_by_hand(monkeypatch, make_rollout):
    monkeypatch.setattr(attention_batches, "MAX_MASK", 14)
    rollouts = [
        make_rollout([3, 4], [5, 6, 7, 1]),  # 3 on 2: a mask of 3 x 5 = 15
        make_rollout([3, 4], [8, 9, 1]),  # of 2 x 4: short enough
        make_rollout([3, 4], [6, 6, 6, 1]),  # 15 again, but the prompt is computed already
        make_rollout([5, 5, 5, 5, 5], [5, 5, 1]),  # 2 on 5 have 14
        make_rollout([6, 6, 6, 6, 6, 6], [5, 5, 1]),  # 2 on 6 have 16, and share no prompt
        make_rollout([7] * 6, [8, 8, 1]),  # 16, but shared, so that a mask costs less
        make_rollout([7] * 6, [9, 9, 1]),
    ]
    layout = build_layout(pack_rollouts(rollouts))
    # Row: prompts 0-1, 2-6, 7-12, 13-18, then completions 19-21, 22-23, 24-26, 27-28, 29-30, ...
    causal = [
        row[row >= 0].tolist()
        for bucket in attention_batches.batch_segments(layout.segments).parts
        for row in bucket.key
        if bucket.mask is None
    ]
    whole = [[0, 1, 19, 20, 21], [0, 1, 24, 25, 26], [*range(7, 13), 29, 30]]
    alone = [[*range(2, 7)], [*range(13, 19)]]
    assert sorted(causal) == sorted(whole + alone)


def test_a_default_device_is_not_where_a_layout_is_worked_out(random_batch):
    """Strategies load models under ``with device:``, and loading scores a micro-batch."""
    batch = random_batch(3)
    plain = build_layout(batch)
    with torch.device("meta"):
        layout = build_layout(batch)
        assert torch.equal(layout.batches.restore, plain.batches.restore)
        assert torch.equal(layout.varlen.keys, plain.varlen.keys)
    assert torch.equal(layout.predictors, plain.predictors)
