"""Test attention through a sliding window: each query sees itself and the tokens just before it."""

import pytest
import torch

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.attention import varlen, windows
from lightning_rl.models.attention.batches import Pieces, Segments
from lightning_rl.models.attention.packed import build_layout, packed_attention
from lightning_rl.models.attention.varlen import attend, plain_varlen
from lightning_rl.models.attention.windows import blocks_of, windowed_batches
from lightning_rl.models.parallel.queries import Piece, PlacedQueries


def of(*rows):
    return (torch.tensor(row) for row in rows)


def test_blocks_by_hand(monkeypatch):
    """The blocks of four have ten tokens after a prompt of three, and a window of four."""
    monkeypatch.setattr(windows, "BLOCK", 4)
    seen = Pieces(*of([3], [10], [0], [3], [10]), rows=torch.arange(13))
    blocks = blocks_of(seen, window=4)
    # Queries 0 to 3 see all of the prompt and themselves; 4 to 7 three tokens before themselves.
    assert blocks.asking.tolist() == [4, 4, 2]
    assert blocks.prefix_start.tolist()[0] == 0
    assert blocks.prefix_length.tolist() == [3, 0, 0]
    assert blocks.start.tolist() == [3, 4, 8]
    assert blocks.length.tolist() == [4, 7, 5]
    assert blocks.earlier.tolist() == [3, 3, 3]


def test_a_window_cuts_the_prompt():
    seen = Pieces(*of([9], [2], [0], [9], [2]), rows=torch.arange(11))
    blocks = blocks_of(seen, window=5)
    assert (blocks.prefix_start.item(), blocks.prefix_length.item()) == (5, 4)
    assert (blocks.start.item(), blocks.length.item()) == (9, 2)


def test_a_mask_by_hand():
    seen = Pieces(*of([0], [4], [0], [0], [4]), rows=torch.arange(4))
    [batch] = windowed_batches(seen, window=2).parts
    assert batch.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def dense(segments: Segments, window: int) -> torch.Tensor:
    """Return which of all S tokens each sees, by their places in their rollouts."""
    size = int(segments.length.sum())
    seen = torch.zeros(size, size, dtype=torch.bool)
    prefix_start, prefix_length = segments.before
    for start, length, before, count in zip(
        segments.start.tolist(), segments.length.tolist(), prefix_start.tolist(),
        prefix_length.tolist(), strict=True,
    ):  # fmt: skip
        row = [*range(before, before + count), *range(start, start + length)]
        for place in range(count, len(row)):
            seen[row[place], row[max(0, place - window + 1) : place + 1]] = True
    return seen


def seen_by(batches, keys: int) -> torch.Tensor:
    """Return the same for calls of SDPA, read from their masks."""
    rows = []
    for batch in batches.parts:
        for query, key, mask in zip(batch.query, batch.key, batch.mask[:, 0], strict=True):
            found = torch.zeros(len(query), keys, dtype=torch.bool)
            for place, row in enumerate(mask):
                assert row.any()  # of padding too, or its softmax would be NaN
                if query[place] >= 0:
                    assert key[row].min() >= 0
                    found[place, key[row]] = True
            rows.append(found)
    # Calls are padded alike within a batch.
    return torch.cat(rows)[batches.restore]


@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 30])
def test_all_queries_see_their_window(monkeypatch, random_rollouts, block, window):
    monkeypatch.setattr(windows, "BLOCK", block)
    for seed in range(3):
        segments = build_layout(pack_rollouts(random_rollouts(seed))).segments
        found = seen_by(windowed_batches(segments.pieces, window), int(segments.length.sum()))
        assert torch.equal(found, dense(segments, window))


@pytest.mark.parametrize("window", [1, 4, 9])
def test_pieces_of_a_rank_see_their_window(monkeypatch, random_rollouts, window):
    monkeypatch.setattr(windows, "BLOCK", 2)
    segments = build_layout(pack_rollouts(random_rollouts(1))).segments
    size = int(segments.length.sum())
    rows = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    pieces = [
        Piece(number, begin, end)
        for number, length in enumerate(segments.length.tolist())
        for begin, end in [(length // 3, length // 3 + (length + 1) // 2)]
        if length
    ]
    placed = PlacedQueries.of(segments, pieces, rows)
    whole = dense(segments, window)
    asked = [
        int(segments.start[piece.segment]) + place
        for piece in pieces
        for place in range(piece.begin, piece.end)
    ]
    expected = torch.zeros(len(asked), size, dtype=torch.bool)
    expected[:, rows] = whole[asked]
    assert torch.equal(seen_by(windowed_batches(placed.pieces, window), size), expected)


@pytest.mark.parametrize("window", [1, 4, 9])
def test_outputs_and_gradients_are_the_kernels(random_rollouts, window):
    layout = build_layout(pack_rollouts(random_rollouts(2)))
    size = len(layout.input_ids)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, size, 4, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    ours, _ = packed_attention(
        torch.nn.Identity(), q, k, v, None, layout=layout, sliding_window=window
    )
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    theirs = attend(*rows, layout.varlen, None, plain_varlen, window)[None]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_no_window_where_no_rollout_is_longer(random_rollouts):
    layout = build_layout(pack_rollouts(random_rollouts(0)))
    q, k, v = (torch.randn(1, 2, len(layout.input_ids), 4) for _ in range(3))
    for window in (None, layout.longest):
        packed_attention(torch.nn.Identity(), q, k, v, None, layout=layout, sliding_window=window)
        assert not layout._windowed
    packed_attention(
        torch.nn.Identity(), q, k, v, None, layout=layout, sliding_window=layout.longest - 1
    )
    assert list(layout._windowed) == [layout.longest - 1]


def test_work_is_as_long_as_the_row(make_rollout):
    def scores(tokens: int) -> int:
        layout = build_layout(pack_rollouts([make_rollout([3], [4] * tokens)]))
        parts = windowed_batches(layout.segments.pieces, window=100).parts
        return sum(part.query.numel() * part.key.shape[1] for part in parts)

    assert scores(8_000) <= 8_000 * (windows.BLOCK + 100) * 1.1
    assert scores(16_000) < 2.1 * scores(8_000)


def test_a_kernel_that_has_no_windows_is_not_used_for_them(monkeypatch):
    def without(*args, window_size, **options):
        return plain_varlen(*args, window_size=varlen.CAUSAL, **options)

    monkeypatch.setattr(varlen, "fused_kernel", lambda: without)
    works = varlen.kernel_works.__wrapped__
    assert works(torch.device("cpu"), torch.float32, 16)
    assert not works(torch.device("cpu"), torch.float32, 16, windowed=True)
    monkeypatch.setattr(varlen, "fused_kernel", lambda: plain_varlen)
    assert works(torch.device("cpu"), torch.float32, 16, windowed=True)
