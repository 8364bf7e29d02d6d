"""Test what every engine does alike: transformers, and vLLM in process, in servers and in Ray.

What only one of them does is in test_transformers_engine.py, test_vllm_engine.py, test_server.py
and test_ray.py. Two servers and two actors start here, which takes most of its minute or more.

Slow: it runs against each engine, and the first of its tests of servers may have to start them.
"""

import asyncio

import pytest
import torch

from lightning_rl.engines import RayEngine, Sampling, TransformersEngine, VLLMLocal, VLLMServer
from lightning_rl.errors import ConfigError, EngineError, IncompleteWeightsError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import (
    PROMPTS,
    ROUNDING,
    connected,
    gap,
    generate,
    own_logprobs,
    parts,
    plain_model,
    require_idle,
    require_written_by,
    same_draws,
    scaled,
    train_adapters,
    true_logprobs,
)

# A hang is a failure; servers and actors take their time to start.
pytestmark = [pytest.mark.timeout(500)]


@pytest.fixture(
    scope="module",
    params=["transformers", "vllm", "servers", pytest.param("actors", marks=pytest.mark.slow)],
)
def started(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(started, weights):
    """Yield the engine with the tiny model's weights, as version 3."""
    started.load_weights(weights.items(), 3)
    yield started
    require_idle(started)


@pytest.fixture(scope="module")
def changed(weights):
    """Return weights of another policy: the same, a fifth smaller."""
    return scaled(weights, 0.8)


@pytest.fixture(scope="module")
def plain(tiny_model, weights):
    return plain_model(tiny_model, weights)


# -------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=16, temperature=0.7),
        Sampling(max_tokens=16, temperature=1.3, top_k=3),
        Sampling(max_tokens=16, top_p=0.6),
        Sampling(max_tokens=16, temperature=0.8, top_k=5, top_p=0.8, min_tokens=4),
        Sampling(max_tokens=16, min_p=0.1, repetition_penalty=1.3, frequency_penalty=0.4),
        Sampling(max_tokens=16, temperature=0.8, presence_penalty=-0.6),
    ],
)
def test_logprobs_are_of_the_distribution_sampled_from(plain, engine, sampling):
    completions = generate(engine, PROMPTS * 4, sampling)
    require_written_by(plain, PROMPTS * 4, completions, sampling)
    assert sum(len(c.token_ids) for c in completions) > 60


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_completions_end_as_they_say(engine, min_tokens):
    sampling = Sampling(max_tokens=8, min_tokens=min_tokens, temperature=2.0)
    completions = generate(engine, PROMPTS * 10, sampling)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions)
        assert set(c.versions) == {3}
        assert 1 not in c.token_ids[:-1]
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == 1)
        assert len(c.token_ids) == 8 or c.finish_reason == "stop"
        assert len(c.token_ids) >= min_tokens


def test_stop_strings_end_a_completion_and_stay_in_it(engine):
    sampling = Sampling(max_tokens=50, temperature=2.0, stop=["="])
    if isinstance(engine, TransformersEngine):
        with pytest.raises(ConfigError, match="not supported by TransformersEngine"):
            generate(engine, [[3]], sampling)
        return
    stopped = [c for c in generate(engine, PROMPTS * 4, sampling) if 2 in c.token_ids]
    assert stopped
    for c in stopped:
        assert c.token_ids.index(2) == len(c.token_ids) - 1
        assert c.finish_reason == "stop"


def test_a_seed_gives_the_same_tokens_in_any_batch(engine):
    """Any replica gives the same tokens, too."""
    sampling = Sampling(max_tokens=12)
    alone = [generate(engine, [p], sampling, [s])[0] for s, p in enumerate(PROMPTS)]
    assert same_draws(generate(engine, PROMPTS, sampling), alone)
    order = [4, 2, 0, 3, 1]
    for part in parts(engine):
        crowd = generate(
            part, [PROMPTS[i] for i in order] + PROMPTS * 5, sampling, order + [99] * 25
        )
        assert same_draws(crowd[:5], [alone[i] for i in order])
    assert alone[0].token_ids != alone[4].token_ids  # one prompt, two seeds
    assert not same_draws([alone[0]] * 2, [alone[4]] * 2)


def test_greedy_takes_the_likeliest_token_whatever_the_seed(plain, engine):
    greedy = Sampling(max_tokens=20, temperature=0)
    first, other = (generate(engine, PROMPTS, greedy, [seed] * 5) for seed in (1, 2))
    assert same_draws(first, other)
    for prompt, completion in zip(PROMPTS, first, strict=True):
        expected = own_logprobs(plain, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=ROUNDING)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([prompt + completion.token_ids])).logits[0]
        likeliest = logits.log_softmax(-1).max(-1).values[len(prompt) - 1 : -1]
        assert float((likeliest - expected).max()) < ROUNDING


def test_requests_join_and_leave_while_others_run(plain, engine):
    """One that comes later and is shorter ends earlier, one is cancelled, and none is disturbed."""
    finished = []

    async def request(prompt, tokens):
        sampling = Sampling(max_tokens=tokens, min_tokens=tokens)
        completion = await engine.generate(prompt, sampling, 1)
        finished.append(tokens)
        return completion

    async def run():
        long, doomed = (asyncio.create_task(request([3], tokens)) for tokens in (120, 110))
        for _ in range(5):  # in this process, they make some steps
            await asyncio.sleep(0)
        short = asyncio.create_task(request([4], 3))
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await asyncio.gather(long, short)

    long, short = run_async(run())
    assert sorted(finished) == [3, 120]
    if len(parts(engine)) == 1:  # else each has a machine's time for itself
        assert finished == [3, 120]
    for prompt, completion, tokens in (([3], long, 120), ([4], short, 3)):
        assert len(completion.token_ids) == tokens
        sampling = Sampling(max_tokens=tokens, min_tokens=tokens)
        require_written_by(plain, [prompt], [completion], sampling)


def test_a_request_that_does_not_fit_is_refused(engine):
    with pytest.raises(EngineError, match=r"prompt of 120 tokens \+ max_tokens=9 exceeds .*128"):
        generate(engine, [[3] * 120], Sampling(max_tokens=9))


# -------------------------------------------------------------------- pushes


TRANSPORTS = {
    "memory": lambda tmp, **options: MemoryTransport(**options),
    "checkpoint": lambda tmp, **options: CheckpointTransport(str(tmp), **options),
}


@pytest.mark.parametrize("name", [*TRANSPORTS, "own"])
def test_a_push_replaces_all_weights_and_what_they_cached(
    tiny_model, tmp_path, weights, changed, engine, own_transport, name
):
    """The tied head included; the last push changes a part of what vLLM fuses."""
    layer = "model.layers.1.self_attn.q_proj.weight"
    states = [weights, changed, changed | {layer: weights[layer] * 2}]
    models = [plain_model(tiny_model, state) for state in states]
    with connected((TRANSPORTS | {"own": own_transport})[name](tmp_path), engine) as transport:
        for version, state in enumerate(states):
            transport.push(state.items(), version)
            assert engine.version == version
            for part in parts(engine):
                assert part.version == version
                assert gap(part, models[version]) < ROUNDING
            if version:
                assert gap(engine, models[version - 1]) > 1e-2


@pytest.mark.parametrize("name", TRANSPORTS)
def test_adapters_alone_make_the_merged_weights(tiny_model, tmp_path, engine, name):
    """One part of each layer that vLLM fuses is adapted; the second push brings no base."""
    policy = Policy(str(tiny_model), lora=LoRA(rank=4, target_modules=["v_proj", "gate_proj"]))
    base = plain_model(tiny_model, dict(policy.named_base_weights()))
    with connected(TRANSPORTS[name](tmp_path, adapters_only=True), engine) as transport:
        for version in (4, 5):
            merged = plain_model(tiny_model, train_adapters(policy, version))
            transport.push(transport.weights_of(policy), version)
            for part in parts(engine):
                assert part.version == version
                assert gap(part, merged) < ROUNDING
        assert gap(engine, base) > 1e-2


def test_tokens_in_flight_keep_the_version_that_wrote_them(
    tiny_model, plain, weights, changed, engine
):
    sampling, prompts = Sampling(max_tokens=120, min_tokens=120), PROMPTS[:3]
    models = {3: plain, 4: plain_model(tiny_model, changed)}
    pauses = not isinstance(engine, TransformersEngine)  # it takes a push between two tokens

    async def start(seconds):
        tasks = [
            asyncio.create_task(engine.generate(p, sampling, s)) for s, p in enumerate(prompts)
        ]
        await asyncio.sleep(seconds)
        await engine.pause()
        assert engine.paused == pauses
        return tasks

    async def finish(tasks):
        await engine.resume()
        return await asyncio.gather(*tasks)

    def interrupted(seconds):
        """Return completions, with a push this long after their start."""
        engine.load_weights(weights.items(), 3)
        tasks = run_async(start(seconds))
        try:
            engine.load_weights(changed.items(), 4)
        finally:
            completions = run_async(finish(tasks))
        return completions

    def require_told_apart(prompt, completion):
        """Require that no old version's token follows a new one's; tell whether there are both."""
        switch = completion.versions.count(3)
        assert completion.versions == [3] * switch + [4] * (120 - switch)
        old, new = (
            true_logprobs(model, prompt, completion.token_ids, sampling)
            for model in models.values()
        )
        assert completion.logprobs == pytest.approx(old[:switch] + new[switch:], abs=ROUNDING)
        if both := 10 < switch < 110:  # neither version alone could have written all
            for alone in (old, new):
                gaps = [abs(a - b) for a, b in zip(completion.logprobs, alone, strict=True)]
                assert max(gaps) > 100 * ROUNDING
        return both

    # Whether the push finds a completion before, in or after its tokens depends on the machine.
    mixed = 0
    for seconds in 3 * (0.01, 0.02, 0.04, 0.06, 0.09, 0.13, 0.2, 0.3, 0.5):
        mixed += sum(map(require_told_apart, prompts, interrupted(seconds)))
        if mixed > 1:
            break
    assert mixed


def test_weights_that_do_not_fit_are_named(plain, weights, changed, engine):
    """Some weights are then new and some old, so nothing is generated until the next push."""
    name = "model.layers.1.mlp.up_proj.weight"  # a part of what vLLM fuses
    for pushed, message in (
        ({n: w for n, w in changed.items() if n != name}, rf"lacks 1 .* first '{name}'"),
        (
            changed | {"visual.weight": torch.ones(1)},
            r"contains 'visual\.weight' .* has none of that",
        ),
        (changed | {name: torch.ones(2, 2)}, rf"{name}' of shape \(2, 2\), .* is \(64, 64\)"),
    ):
        with pytest.raises(IncompleteWeightsError, match=message):
            engine.load_weights(pushed.items(), 4)
        assert engine.version == -1
        with pytest.raises(EngineError, match="no trained weights"):
            generate(engine, [[3]], Sampling(max_tokens=1))
    engine.load_weights(weights.items(), 5)
    assert gap(engine, plain) < ROUNDING


@pytest.mark.parametrize("kind", [TransformersEngine, VLLMLocal, VLLMServer, RayEngine])
def test_an_engine_that_was_not_started_says_so_and_can_be_closed(weights, kind):
    engine = kind()
    with pytest.raises(EngineError, match="not running; call start"):
        generate(engine, [[3]], Sampling(max_tokens=1))
    with pytest.raises(EngineError, match="not running; call start"):
        engine.load_weights(weights.items(), 0)
    for _ in range(2):
        engine.close()
        assert not engine.running
