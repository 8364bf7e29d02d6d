"""Test TransformersEngine: its draws, its batches, and weights that come while it writes.

What it does as every engine does is in tests/integration/test_engine_contract.py.
"""

import asyncio
import json
import shutil
import threading
import weakref
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.engines import Sampling, TransformersEngine, request_seed
from lightning_rl.engines.hf.decoding import Decoder
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.run.loop.background import run_async
from tests.support.engine_checks import PROMPTS, generate, same_draws


@pytest.fixture(scope="module")
def start(skeleton, weights):
    """Build an engine that holds the tiny model's weights."""

    def build(**options) -> TransformersEngine:
        engine = TransformersEngine(device="cpu", **options)
        engine.start(skeleton)
        engine.load_weights(weights.items(), 3)
        return engine

    return build


@pytest.fixture(scope="module")
def engine(start):
    return start()


@pytest.mark.parametrize(("threads", "place"), [(1, "lightning_rl"), (2, "MainThread")])
def test_steps_of_several_threads_are_in_the_thread_that_trains(
    engine, monkeypatch, threads, place
):
    """The main thread waits for them; what is written is the same."""
    sampling, places, step = Sampling(max_tokens=12), set(), Decoder.step

    def noted(decoder):
        places.add(threading.current_thread().name)
        return step(decoder)

    async def run():
        return await asyncio.gather(*(engine.generate(p, sampling, 7) for p in PROMPTS))

    expected = generate(engine, PROMPTS, sampling, [7] * len(PROMPTS))
    monkeypatch.setattr(Decoder, "step", noted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with torch.autocast("cpu", torch.bfloat16):  # the trainer's, which the engine does not share
        assert run_async(run()) == expected
    assert places == {place}


def test_frequencies_are_those_of_the_filtered_distribution(tiny_model, engine):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[3, 4, 2]])).logits[0, -1].double()
    for sampling in (Sampling(1, 1.5, top_k=4), Sampling(1, 1.5, top_p=0.7)):
        p = (logits / 1.5).softmax(-1)
        ordered, order = p.sort(descending=True)
        keep = 4 if sampling.top_k else int((ordered.cumsum(0) < 0.7).sum()) + 1
        expected = {int(i): float(p[i] / ordered[:keep].sum()) for i in order[:keep]}
        drawn = generate(engine, [[3, 4, 2]] * 2000, sampling)
        counts = Counter(c.token_ids[0] for c in drawn)
        assert set(counts) <= set(expected)
        for token, probability in expected.items():
            # Five standard deviations of a share of 2000.
            spread = 5 * (probability * (1 - probability) / 2000) ** 0.5
            assert counts[token] / 2000 == pytest.approx(probability, abs=spread)


@pytest.mark.parametrize("batch", [1, 2, 256])
def test_a_seed_gives_the_same_tokens_in_any_batch(engine, start, batch):
    sampling = Sampling(max_tokens=10)
    expected = [generate(engine, [p], sampling, [s])[0] for s, p in enumerate(PROMPTS)]
    together = generate(start(max_batch_size=batch), PROMPTS, sampling)
    assert same_draws(together, expected)
    assert together[0].token_ids != together[4].token_ids  # one prompt, two seeds


def test_generating_leaves_torchs_random_state_alone(engine, start):
    before = torch.get_rng_state()
    generate(start(), PROMPTS, Sampling(max_tokens=4))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_are_taken_one_at_a_time(start, weights):
    """Sharded weights and merged LoRAs come so."""
    seen = []

    def made():
        for name, weight in weights.items():
            fresh = weight / 2
            seen.append(weakref.ref(fresh))
            yield name, fresh
            del fresh
            assert sum(ref() is not None for ref in seen) <= 1  # the engine's loop holds the last

    engine = start()
    engine.load_weights(made(), 4)
    held = engine._lm.state_dict()
    assert all(torch.equal(held[name], weight / 2) for name, weight in weights.items())


def test_an_engine_without_weights_says_why(skeleton):
    engine = TransformersEngine(device="cpu")
    engine.start(skeleton)
    with pytest.raises(EngineError, match=r"no trained weights yet .*WeightSync"):
        generate(engine, [[3]], Sampling(max_tokens=1))
    engine.close()
    engine.close()
    assert not engine.running


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be >= 1"),
        ({"temperature": -0.1}, r"temperature=-0\.1 must be 0 \(greedy\), or"),
        ({"top_p": 0.0}, r"top_p=0\.0 must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k=-1 must be >= 0"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens=5 must be in \[0, max_tokens\]"),
    ],
)
def test_impossible_sampling_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def test_request_seeds_differ_in_every_part_and_stay_what_they_are():
    base = request_seed(0, "a", 0, 0)
    others = [request_seed(1, "a", 0, 0), request_seed(0, "b", 0, 0)]
    others += [request_seed(0, "a", 1, 0), request_seed(0, "a", 0, 1), request_seed(0, "a", 0, -1)]
    assert len({base, *others}) == 6
    assert all(0 <= seed < 2**63 for seed in [base, *others])
    # printf 0/a/0/0 | b2sum -l 64, halved: a rollout of an old run can be generated again.
    assert base == 6388178686916178054


def test_closing_ends_a_request_with_an_error(start):
    engine = start()

    async def run():
        request = asyncio.create_task(engine.generate([3], Sampling(max_tokens=2), 0))
        await asyncio.sleep(0)  # it waits for its batch
        engine.close()
        await request

    with pytest.raises(EngineError, match="the engine was closed"):
        asyncio.run(run())


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_it_ends_with_any_end_token_of_the_model(tiny_model, weights, tmp_path, file):
    """vLLM and scoring do so, too: a chat model has several."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    said = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps(said | {"eos_token_id": [1, 5]}))
    save_skeleton(str(model), tmp_path / "engine")
    engine = TransformersEngine(device="cpu")
    engine.start(tmp_path / "engine")
    engine.load_weights(weights.items(), 3)
    sampling = Sampling(max_tokens=8, min_tokens=3, temperature=2.0)
    last = Counter()
    for completion in generate(engine, PROMPTS * 20, sampling):
        assert not {1, 5} & set(completion.token_ids[:-1])
        assert len(completion.token_ids) > 3 or completion.finish_reason == "length"
        if completion.finish_reason == "stop":
            last[completion.token_ids[-1]] += 1
    assert set(last) == {1, 5}


# ---------------------------------------------------------------- batches


def sizes_of_batches(engine, monkeypatch, gaps):
    """Send requests one by one, so many turns apart; return how many joined at once."""
    sizes, join = [], Decoder.join

    def counted(decoder, rows):
        if rows:
            sizes.append(len(rows))
        join(decoder, rows)

    monkeypatch.setattr(Decoder, "join", counted)

    async def trickle():
        tasks = []
        for seed, gap in enumerate(gaps):
            for _ in range(gap):
                await asyncio.sleep(0)
            request = engine.generate([3, 4], Sampling(max_tokens=2), seed)
            tasks.append(asyncio.create_task(request))
        return await asyncio.gather(*tasks)

    return sizes, asyncio.run(trickle())


def test_a_batch_waits_for_enough_requests(start, monkeypatch):
    gaps = [5] * 7
    alone, expected = sizes_of_batches(start(), monkeypatch, gaps)
    assert alone == [1] * 7
    waits = start(min_batch_size=3, max_wait_s=60.0)
    # Six fill two batches; a seventh would wait for a minute.
    sizes, completions = sizes_of_batches(waits, monkeypatch, gaps[:6])
    assert sizes == [3, 3]
    assert same_draws(completions, expected[:6])


def test_a_batch_waits_no_longer_than_it_may(start, monkeypatch):
    sizes, completions = sizes_of_batches(
        start(min_batch_size=3, max_wait_s=0.01), monkeypatch, [0, 0]
    )
    assert sizes == [2]
    assert all(completion.token_ids for completion in completions)


def staggered(engine, prompts, sampling):
    """Send request ``seed``, ``seed`` turns of the loop after the first."""

    async def run():
        tasks = []
        for seed, prompt in enumerate(prompts):
            tasks.append(asyncio.create_task(engine.generate(prompt, sampling, seed)))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    return asyncio.run(run())


def test_who_joins_later_gets_what_it_would_have_got_alone(engine):
    """Prompts of one to forty tokens, into a batch in which others are ahead, or over."""
    prompts = [[3 + (i + j) % 7 for j in range(1 + 13 * i % 40)] for i in range(20)]
    sampling = Sampling(max_tokens=15, temperature=1.5, top_k=9)
    alone = [generate(engine, [p], sampling, [s])[0] for s, p in enumerate(prompts)]
    together = staggered(engine, prompts, sampling)
    assert same_draws(together, alone)
    assert len({len(c.token_ids) for c in together}) > 3


class Telling:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self, lock):
        self.lock, self.waited_for = lock, threading.Event()

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            self.waited_for.set()
            self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


def test_a_request_that_comes_during_a_push_waits_for_its_end(start, weights):
    engine = start()
    lock = engine._exclusive = Telling(engine._exclusive)
    begun = threading.Event()

    def until_somebody_waits():
        begun.set()
        lock.waited_for.wait()
        yield from weights.items()

    push = threading.Thread(target=engine.load_weights, args=(until_somebody_waits(), 4))
    push.start()
    begun.wait()
    try:
        (completion,) = generate(engine, [[3]], Sampling(max_tokens=2, min_tokens=2))
    finally:
        lock.waited_for.set()
        push.join()
    assert completion.versions == [4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_batch_size": 0}, "min_batch_size=0 must be >= 1"),
        (
            {"min_batch_size": 9, "max_batch_size": 8},
            "min_batch_size=9 must be <= max_batch_size=8",
        ),
        ({"max_wait_s": -1.0}, "max_wait_s=-1.0 must be >= 0"),
    ],
)
def test_impossible_batches_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TransformersEngine(device="cpu", **options)


def test_a_device_that_is_not_there_is_named(tiny_model):
    engine = TransformersEngine(device="cuda:63")
    with pytest.raises(ConfigError, match=r"engine device='cuda:63' cannot be used here \("):
        engine.start(tiny_model)
    assert not engine.running
