"""TransformersEngine: seeded, exact, and true to its sampling options."""

import asyncio
import json
import threading
import weakref
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.engines import Sampling, TransformersEngine, request_seed
from lightning_rl.engines.decoding import Decoder
from lightning_rl.errors import ConfigError, EngineError, IncompleteWeightsError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop import run_async
from tests.support.engine_checks import same_draws
from tests.support.tolerances import scores_rounding

PROMPTS = [[3, 4, 2], [5], [6, 7, 8, 9, 10, 2], [3, 4, 2]]


@pytest.fixture(scope="module")
def weights(tiny_model):
    return dict(Policy(str(tiny_model)).named_weights())


@pytest.fixture(scope="module")
def start(tiny_model, weights, tmp_path_factory):
    """Build an engine that holds the tiny model's weights."""

    def build(**options) -> TransformersEngine:
        directory = tmp_path_factory.mktemp("skeleton")
        save_skeleton(str(tiny_model), directory)
        engine = TransformersEngine(device="cpu", **options)
        engine.start(directory)
        engine.load_weights(weights.items(), 3)
        return engine

    return build


@pytest.fixture(scope="module")
def engine(start):
    return start()


def generate(engine, prompts, sampling, seeds=None):
    seeds = range(len(prompts)) if seeds is None else seeds

    async def run():
        pairs = zip(prompts, seeds, strict=True)
        return await asyncio.gather(*(engine.generate(p, sampling, s) for p, s in pairs))

    return asyncio.run(run())


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


def processed_logprobs(plain, prompt, completion, sampling) -> list[float]:
    """The logprobs of a completion from its definition, in float64."""
    ids = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
    result = []
    for step, token in enumerate(completion.token_ids):
        z = logits[step] / sampling.temperature
        if step < sampling.min_tokens:
            z[1] = -torch.inf
        if sampling.top_k:
            z[z < z.sort(descending=True).values[sampling.top_k - 1]] = -torch.inf
        p = z.softmax(-1)
        ordered = p.sort(descending=True)
        kept, mass = set(), 0.0
        for index, probability in zip(ordered.indices, ordered.values, strict=True):
            if mass >= sampling.top_p:
                break
            kept.add(int(index))
            mass += float(probability)
        assert token in kept
        result.append(float((p[token] / mass).log()))
    return result


SAMPLINGS = [
    Sampling(max_tokens=12, temperature=0.7),
    Sampling(max_tokens=12, temperature=1.3, top_k=3),
    Sampling(max_tokens=12, top_p=0.6),
    Sampling(max_tokens=12, temperature=0.8, top_k=5, top_p=0.8, min_tokens=4),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_logprobs_are_of_the_distribution_sampled_from(tiny_model, engine, sampling):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    for prompt, completion in zip(PROMPTS, generate(engine, PROMPTS, sampling), strict=True):
        expected = processed_logprobs(plain, prompt, completion, sampling)
        bound = scores_rounding(tiny_model, torch.tensor(expected))
        assert completion.logprobs == pytest.approx(expected, abs=bound)


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
    assert together[0].token_ids != together[3].token_ids  # one prompt, two seeds


def test_greedy_takes_the_likeliest_token_whatever_the_seed(tiny_model, engine):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    greedy = Sampling(max_tokens=6, temperature=0)
    first, other = (generate(engine, PROMPTS, greedy, [s] * 4) for s in (1, 2))
    assert [c.token_ids for c in first] == [c.token_ids for c in other]
    ids = PROMPTS[2]
    for token in first[2].token_ids:
        logits = plain(input_ids=torch.tensor([ids])).logits[0, -1]
        assert float(logits.max() - logits[token]) < scores_rounding(tiny_model, logits)
        ids = [*ids, token]


def test_completions_end_as_they_say(engine):
    completions = generate(engine, PROMPTS * 10, Sampling(max_tokens=5, temperature=2.0))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions)
        assert set(c.versions) == {3}
        assert 1 not in c.token_ids[:-1]
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == 1)
        assert len(c.token_ids) == 5 or c.finish_reason == "stop"


def test_min_tokens_holds_the_end_back(engine):
    completions = generate(
        engine, PROMPTS * 10, Sampling(max_tokens=8, min_tokens=6, temperature=2.0)
    )
    assert min(len(c.token_ids) for c in completions) >= 6


def test_generating_leaves_torchs_random_state_alone(engine, start):
    before = torch.get_rng_state()
    generate(start(), PROMPTS, Sampling(max_tokens=4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_push_replaces_all_weights(tiny_model, start, weights):
    engine = start()
    sampling = Sampling(max_tokens=5, temperature=0.7)
    before = generate(engine, PROMPTS, sampling)
    changed = {name: weight * 1.3 for name, weight in weights.items()}
    engine.load_weights(changed.items(), 4)
    after = generate(engine, PROMPTS, sampling)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain.load_state_dict(changed)
    assert before[2].logprobs != pytest.approx(after[2].logprobs, abs=1e-2)
    expected = processed_logprobs(plain, PROMPTS[2], after[2], sampling)
    bound = scores_rounding(tiny_model, torch.tensor(expected))
    assert after[2].logprobs == pytest.approx(expected, abs=bound)
    assert set(after[0].versions) == {4}


def test_weights_that_do_not_fit_are_named(start, weights):
    engine, name = start(), "model.layers.1.mlp.up_proj.weight"
    for pushed, message in (
        ({n: w for n, w in weights.items() if n != name}, rf"left out 1 .* first '{name}'"),
        (weights | {"visual.weight": torch.ones(1)}, r"brings 'visual\.weight' .* none of that"),
        (weights | {name: torch.ones(2, 2)}, rf"{name}' of shape \(2, 2\), .* is \(64, 64\)"),
    ):
        with pytest.raises(IncompleteWeightsError, match=message):
            engine.load_weights(pushed.items(), 4)
        assert engine.version == -1  # some may be new, others old
        engine.load_weights(weights.items(), 3)


def test_weights_are_taken_one_at_a_time(start, weights):
    """As they come where they are sharded, or a LoRA is merged."""
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


def test_an_engine_that_is_not_ready_says_why(tiny_model, tmp_path):
    engine = TransformersEngine(device="cpu")
    with pytest.raises(EngineError, match=r"not running; call start\(\)"):
        generate(engine, [[3]], Sampling(max_tokens=1))
    save_skeleton(str(tiny_model), tmp_path)
    engine.start(tmp_path)
    with pytest.raises(EngineError, match=r"no trained weights yet .*WeightSync"):
        generate(engine, [[3]], Sampling(max_tokens=1))
    engine.close()
    engine.close()
    assert not engine.running


def test_requests_beyond_the_models_length_are_refused(engine):
    with pytest.raises(EngineError, match=r"prompt of 120 tokens \+ max_tokens=9 exceeds .*128"):
        generate(engine, [[3] * 120], Sampling(max_tokens=9))


def test_stop_strings_are_refused(engine):
    with pytest.raises(ConfigError, match="not supported by TransformersEngine"):
        generate(engine, [[3]], Sampling(max_tokens=2, stop=["="]))


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


def test_it_ends_with_any_end_token_of_the_model(tiny_model, weights, tmp_path):
    """As vLLM does, and as scoring takes it: a chat model has several."""
    save_skeleton(str(tiny_model), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 5]}))
    engine = TransformersEngine(device="cpu")
    engine.start(tmp_path)
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
    """Requests that arrive one by one, so many turns of the loop apart; how many joined at once."""
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


def staggered(engine, prompts, sampling, between=lambda step: None):
    """Request ``seed`` comes ``seed`` turns of the loop after the first."""

    async def run():
        tasks = []
        for seed, prompt in enumerate(prompts):
            tasks.append(asyncio.create_task(engine.generate(prompt, sampling, seed)))
            await asyncio.sleep(0)
            between(seed)
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


def test_a_push_between_two_tokens_makes_the_next_exactly_its_versions(tiny_model, start, weights):
    engine, plain = start(), AutoModelForCausalLM.from_pretrained(tiny_model)
    changed = {name: weight * 1.5 for name, weight in weights.items()}

    def push(step):
        if step == 5:
            engine.load_weights(changed.items(), 4)

    prompts = [[3, 4, 5, 6, 2], [5], [6, 7], [3, 4, 5, 6, 2], [8], [9], [4], [5, 5]]
    done = staggered(engine, prompts, Sampling(max_tokens=12, min_tokens=12), push)
    both = [c for c in done if len(set(c.versions)) == 2]
    assert len(both) >= 4
    other = AutoModelForCausalLM.from_pretrained(tiny_model)
    other.load_state_dict(changed, strict=False)
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt + completion.token_ids])
        for step, (token, logprob) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)
        ):
            model = plain if completion.versions[step] == 3 else other
            logits = model(input_ids=ids[:, : len(prompt) + step]).logits[0, -1].detach()
            logits[1] = -torch.inf  # min_tokens
            assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)


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


def test_a_request_that_nobody_waits_for_leaves_the_batch(engine):
    async def run():
        given_up = asyncio.create_task(engine.generate([3], Sampling(90, min_tokens=90), 0))
        other = asyncio.create_task(engine.generate([4], Sampling(20, min_tokens=20), 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert engine.in_flight == 2
        given_up.cancel()
        await other
        return engine.in_flight

    assert asyncio.run(run()) == 0


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
