"""Places that share a micro-batch's queries: equal tokens and work, one process's attention."""

import random

import pytest
import torch
from torch import Tensor

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention import short_segments as short_attention
from lightning_rl.models.attention.batches import EndAligned
from lightning_rl.models.attention.packed import PackLayout, build_layout, packed_attention
from lightning_rl.models.attention.varlen import attend, plain_varlen
from lightning_rl.models.parallel import queries as query_shares
from lightning_rl.models.parallel.queries import Piece, deal
from lightning_rl.models.parallel.sequence import require_heads
from lightning_rl.models.parallel.sharing import head_ranks
from tests.support.places import placed


def unevenness(shares: list[list[Piece]], before: list[int]) -> float:
    """Return the most keys that a place's queries see, over the mean."""
    work = [sum(piece.work(before) for piece in pieces) for pieces in shares]
    return max(work) * len(work) / sum(work)


def in_order(lengths: list[int], places: int) -> list[list[Piece]]:
    """Deal each place the tokens after those of the one before it."""
    room = -(-sum(lengths) // places)
    shares: list[list[Piece]] = [[] for _ in range(places)]
    first = 0
    for segment, length in enumerate(lengths):
        for token in range(length):
            shares[(first + token) // room].append(Piece(segment, token, token + 1))
        first += length
    return shares


def test_the_halves_of_a_rollout_by_hand():
    """8 tokens see 1 to 8 keys: 10 of the first four and 26 of the rest, 18 on average."""
    shares = deal([8], [0], places=2, room=4)
    assert shares == [[Piece(0, 0, 2), Piece(0, 6, 8)], [Piece(0, 2, 6)]]
    assert [piece.work([0]) for piece in shares[0]] == [1 + 2, 7 + 8]
    assert unevenness(in_order([8], 2), [0]) == 26 / 18
    assert unevenness(shares, [0]) == 1
    # The last of 8 places in order has nearly 15/8 of the mean for a long sequence.
    assert unevenness(in_order([4096], 8), [0]) == pytest.approx(15 / 8, abs=0.001)
    assert unevenness(deal([4096], [0], places=8, room=512), [0]) == 1


def test_rollouts_that_share_a_prompt_by_hand():
    """A prompt of 4, and 8 and 4 tokens after it: of 104 keys the second half would see 68."""
    lengths, before = [4, 8, 4], [0, 4, 4]
    shares = deal(lengths, before, places=2, room=8)
    assert shares[0] == [
        Piece(0, 0, 1), Piece(0, 3, 4),
        Piece(1, 0, 2), Piece(1, 6, 8),
        Piece(2, 0, 1), Piece(2, 3, 4),
    ]  # fmt: skip
    # 1 + 4 of the prompt's, and what completions see of themselves beside its 4.
    assert sum(p.work(before) for p in shares[0]) == 5 + (4 * 4 + 18) + (2 * 4 + 5) == 52
    assert unevenness(shares, before) == 1
    assert unevenness(in_order(lengths, 2), before) == 68 / 52


def test_short_segments_stay_whole_and_the_most_work_goes_first():
    before = list(range(15, -1, -1))  # one token each, which sees 16 to 1 keys
    shares = deal([1] * 16, before, places=2, room=8)
    works = [[p.work(before) for p in pieces] for pieces in shares]
    assert works == [[16, 13, 12, 9, 8, 5, 4, 1], [15, 14, 11, 10, 7, 6, 3, 2]]
    assert unevenness(shares, before) == 1


def test_only_where_there_is_no_room_is_a_short_segment_cut():
    shares = deal([3] * 17, [0] * 17, places=2, room=26)
    assert [sum(piece.tokens for piece in pieces) for pieces in shares] == [26, 25]
    assert sorted(piece.tokens for pieces in shares for piece in pieces) == [1, 2, *[3] * 16]


def test_there_may_be_more_places_than_tokens():
    assert deal([1, 2], [0, 1], places=4, room=1) == [
        [Piece(0, 0, 1)], [Piece(1, 1, 2)], [Piece(1, 0, 1)], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "places", "in_turn", "dealt"),
    [
        (0, 2, 1.12, 1.00), (1, 2, 1.21, 1.00), (2, 2, 1.19, 1.00), (3, 2, 1.26, 1.00),
        (0, 3, 1.22, 1.00), (1, 3, 1.38, 1.00), (2, 3, 1.15, 1.00), (3, 3, 1.22, 1.00),
        (0, 8, 2.63, 1.00), (1, 8, 2.05, 1.01), (2, 8, 1.78, 1.00), (3, 8, 3.04, 1.01),
    ],
)  # fmt: skip
def test_every_token_has_a_place_and_work_is_even(seed, places, in_turn, dealt):
    """The groups have prompts of up to 300 tokens, and completions of which few are long."""
    rng = random.Random(seed)
    lengths, before = [], []
    for _ in range(6):
        prompt = rng.randint(1, 300)
        completions = [min(8000, int(rng.paretovariate(0.7) * 40)) for _ in range(8)]
        lengths += [prompt, *completions]
        before += [0, *[prompt] * 8]
    room = -(-sum(lengths) // places)
    shares = deal(lengths, before, places, room)
    tokens = [
        (piece.segment, token)
        for pieces in shares
        for piece in pieces
        for token in range(piece.begin, piece.end)
    ]
    assert sorted(tokens) == [(s, t) for s, length in enumerate(lengths) for t in range(length)]
    assert max(sum(piece.tokens for piece in pieces) for pieces in shares) <= room
    assert unevenness(in_order(lengths, places), before) == pytest.approx(in_turn, abs=0.006)
    assert unevenness(shares, before) == pytest.approx(dealt, abs=0.006)


@pytest.mark.parametrize("masked", [0, 10, 1 << 16])
@pytest.mark.parametrize("places", [2, 5])
def test_places_attend_together_as_one_process_does(monkeypatch, random_batch, places, masked):
    """The outputs and gradients agree, with masks and without, and by the fused kernel's
    definition.
    """
    monkeypatch.setattr(query_shares, "MASKED", masked)
    monkeypatch.setattr(short_attention, "MOST_KEYS", masked >> 10)  # as where pieces are long
    whole = build_layout(random_batch(2, groups=5))
    size, generator = len(whole.input_ids), torch.Generator().manual_seed(1)
    q, k, v, towards = (
        torch.randn(1, heads, size, 8, generator=generator, dtype=torch.double, requires_grad=True)
        for heads in (4, 2, 2, 4)
    )
    towards = towards.transpose(1, 2)

    def attended(layout: PackLayout) -> Tensor:
        return packed_attention(torch.nn.Identity(), q, k, v, None, layout=layout)[0]

    def fused(layout: PackLayout) -> Tensor:
        rows = layout.exchange.gather_tokens(*(x[0].transpose(0, 1) for x in (q, k, v)))
        return attend(*rows, layout.varlen, None, plain_varlen)[None]

    expected = attended(whole)
    gradients = torch.autograd.grad((expected * towards).sum(), (q, k, v))
    kinds = set()
    for way in (attended, fused):
        outputs, loss = torch.zeros_like(expected), 0.0
        for place in range(places):
            layout, own = placed(whole, place, places)
            found = way(layout)[:, : len(own)]
            kinds |= {type(batch) for batch in layout.batches.parts}
            outputs[:, own] = found
            loss = loss + (found * towards[:, own]).sum()
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
        found = torch.autograd.grad(loss, (q, k, v))
        for ours, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert (EndAligned in kinds) == (masked < 1 << 16)


def test_a_place_without_tokens_takes_part(make_rollout):
    whole = build_layout(pack_rollouts([make_rollout([3], [4, 5])]))  # two tokens are computed
    layout, own = placed(whole, 3, 4)
    assert len(own) == 0
    key = torch.randn(1, 1, 2, 8, requires_grad=True)
    output, _ = packed_attention(torch.nn.Identity(), key, key, key, None, layout=layout)
    assert output.shape == (1, 1, 1, 8)
    assert output.requires_grad


def test_a_long_pieces_mask_takes_a_row(make_rollout):
    whole = build_layout(pack_rollouts([make_rollout([3] * 8, [4] * 2041)]))
    layout, _ = placed(whole, 0, 2)
    _, first, last = layout.batches.parts  # after some of the prompt
    assert [first.key.shape, last.key.shape] == [(1, 8 + 510), (1, 8 + 2040)]
    query = torch.zeros(1, 1, 510, 8)
    mask = last.mask_for(query)
    assert mask.untyped_storage().nbytes() == 4 * (510 + 2048 - 1)
    assert torch.equal(mask[0, 0].flip(0) == 0, torch.ones(510, 2048).tril(2048 - 510) > 0)
    assert last.mask_for(query).data_ptr() == mask.data_ptr()  # the same for all layers


@pytest.mark.parametrize(
    ("ranks", "query", "key", "expected"),
    [
        (4, 32, 8, 4),
        (16, 32, 8, 16),  # key heads are copied
        (64, 32, 8, 32),
        (4, 2, 1, 2),
        (4, 1, 1, 1),
        (6, 4, 2, 2),  # 3 divides no heads, and 4 not the ranks
        (8, 14, 2, 2),
        (12, 12, 8, 4),  # 6 and 12 neither divide 8 key heads nor are divided by them
    ],
)
def test_as_many_ranks_share_heads_as_can(ranks, query, key, expected):
    assert head_ranks(ranks, query, key) == expected
    require_heads(expected, query, key)


def test_heads_of_a_layer_that_the_configuration_does_not_tell_of():
    with pytest.raises(ConfigError, match=r"4 processes .* 6 attention and 2 key-value heads"):
        require_heads(4, 6, 2)
