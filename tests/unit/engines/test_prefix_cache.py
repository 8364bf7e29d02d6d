"""Test kept texts: a turn that continues one reads what is new, and gets what it would have got."""

import asyncio

import pytest
import torch

from lightning_rl.engines import Sampling
from lightning_rl.engines.hf.decoding import Decoder
from lightning_rl.engines.prefix_cache import PrefixCache
from lightning_rl.errors import ConfigError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from tests.support.lots import LotEngine
from tests.support.tolerances import rounding

SAMPLING = Sampling(max_tokens=9, min_tokens=3)
CHATS = [[3, 4, 2], [5], [6, 7, 8, 9, 10, 2], [3, 4, 2]]


@pytest.fixture(scope="module")
def weights(tiny_model):
    return {name: w.double() for name, w in Policy(str(tiny_model)).named_weights()}


@pytest.fixture
def start(tiny_model, weights, tmp_path_factory):
    """Start an engine whose tokens no rounding decides, in float64."""

    def build(kept_tokens, **options) -> LotEngine:
        directory = tmp_path_factory.mktemp("skeleton")
        save_skeleton(str(tiny_model), directory)
        engine = LotEngine(device="cpu", kept_tokens=kept_tokens, **options)
        engine.dtype = "float64"  # of the model alone: tokens are drawn in float32
        engine.start(directory)
        engine.load_weights(weights.items(), 3)
        return engine

    return build


@pytest.fixture
def read(monkeypatch):
    """Return the columns and rows of tokens that a model was given, call by call."""
    shapes, compute = [], Decoder.compute

    def noted(decoder, rows, cache, **inputs):
        shapes.append(tuple(inputs["input_ids"].shape))
        return compute(decoder, rows, cache, **inputs)

    monkeypatch.setattr(Decoder, "compute", noted)
    return shapes


def chat(engine, turns: int, between=lambda turn: None):
    """Run four chats side by side, with answers of one to four tokens; return completions."""

    async def play():
        texts, told = [list(text) for text in CHATS], []
        for turn in range(turns):
            made = await asyncio.gather(
                *(engine.generate(t, SAMPLING, 7 * turn + n) for n, t in enumerate(texts))
            )
            told += made
            for number, (text, completion) in enumerate(zip(texts, made, strict=True)):
                text += completion.token_ids + [2, 3, 4, 5][: 1 + number]
            between(turn)
        return told

    return asyncio.run(play())


def require_same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.versions) == (other.token_ids, other.versions)
        # The model computes in float64, the softmax of its 16 logits, from -15 to 15, in float32.
        bound = rounding(additions=16, magnitude=30.0)
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 3}, {"max_batch_size": 1}])
def test_turns_are_what_they_are_without(start, read, options):
    expected = chat(start(0, **options), 5)
    whole = sum(rows * columns for rows, columns in read if columns > 1)
    read.clear()
    require_same(chat(start(10**6, **options), 5), expected)
    assert sum(rows * columns for rows, columns in read if columns > 1) < whole / 2


def test_only_what_is_new_is_read(start, read):
    engine = start(10**6)
    chat(engine, 1)
    [kept] = [k for k in engine._kept._kept.values() if k.token_ids[:2] == [5, *k.token_ids[1:2]]]
    read.clear()
    asyncio.run(engine.generate([*kept.token_ids, 3, 4], SAMPLING, 1))
    assert read[0] == (1, 2)


def test_little_room_keeps_the_last(start, read):
    expected = chat(start(0), 5)
    engine = start(40)
    require_same(chat(engine, 5), expected)
    assert 0 < engine._kept.tokens <= 40


@pytest.mark.parametrize("version", [3, 4])
def test_a_push_leaves_nothing_of_the_weights_before(start, weights, version):
    """A push of the same version does so, too: another policy may have it."""
    other = {name: w * 1.25 for name, w in weights.items()}

    def push(engine):
        def between(turn):
            if turn == 1:
                engine.load_weights(other.items(), version)
                assert engine._kept is None or engine._kept.tokens == 0

        return between

    plain, keeping = start(0), start(10**6)
    require_same(chat(keeping, 4, push(keeping)), chat(plain, 4, push(plain)))


def test_a_push_in_the_middle_of_a_turn_leaves_nothing_either(start, weights, monkeypatch):
    other, step = {name: w * 1.25 for name, w in weights.items()}, LotEngine._step
    steps = 0

    def pushing(engine, decoder):
        nonlocal steps
        steps += 1
        if steps == 12:
            engine._forget_texts()
            engine._take(engine._lm, other.items())
            engine.version = 4
        return step(engine, decoder)

    monkeypatch.setattr(LotEngine, "_step", pushing)
    expected = chat(start(0), 4)
    steps = 0
    require_same(chat(start(10**6), 4), expected)
    assert {3, 4} == {version for one in expected for version in one.versions}


def test_sleep_and_close_keep_nothing(start):
    for end in ("sleep", "close"):
        engine = start(10**6)
        chat(engine, 1)
        assert engine._kept.tokens > 0
        getattr(engine, end)()
        assert engine._kept.tokens == 0


def test_the_longest_beginning_is_found_and_dropped_first():
    class Writer:
        version = 1

    def layers(count):
        return [(torch.zeros(1, count, 1), torch.zeros(1, count, 1))]

    kept, writer = PrefixCache(12), Writer()
    for text in ([1, 2], [1, 2, 3], [1, 2, 4, 5]):
        kept.keep(writer, text, layers(len(text)))
    assert kept.longest(writer, [1, 2, 3, 9]).token_ids == [1, 2, 3]
    assert kept.longest(writer, [1, 2, 3]).token_ids == [1, 2]  # a token at least is read
    assert kept.longest(writer, [2, 1]) is None
    assert kept.longest(Writer(), [1, 2, 3]) is None
    kept.keep(writer, [7] * 5, layers(5))  # 14 tokens: what was continued last goes first
    assert kept.longest(writer, [1, 2, 9]) is None
    assert kept.longest(writer, [1, 2, 3, 9]).token_ids == [1, 2, 3]
    writer.version = 2
    assert kept.longest(writer, [1, 2, 3, 9]) is None
    kept.keep(writer, [7] * 13, layers(13))  # more than there is room for
    assert kept.tokens == 12


def test_less_than_nothing_is_refused():
    with pytest.raises(ConfigError, match="kept_tokens=-1"):
        LotEngine(kept_tokens=-1)
