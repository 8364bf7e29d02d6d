"""VLLMLocal against the Hugging Face model: logprobs, seeds, concurrency, weight pushes."""

import asyncio
import gc
import inspect
import os
import random
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from lightning_rl.engines import Sampling, TransformersEngine, VLLMLocal
from lightning_rl.errors import ConfigError, EngineError, IncompleteWeightsError, WeightSyncError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop import run_async
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import (
    LONG,
    PROMPTS,
    ROUNDING,
    generate,
    plain_model,
    require_switch,
    same_draws,
    scaled,
    true_logprobs,
)


@pytest.fixture(scope="module")
def changed(weights):
    """Weights of another policy: the same, a fifth smaller."""
    return scaled(weights, 0.8)


@pytest.fixture(scope="module")
def started(skeleton):
    engine = VLLMLocal(max_model_len=128, kv_cache_gb=0.05)
    engine.start(skeleton)
    yield engine
    engine.close()


@pytest.fixture
def engine(started, weights):
    """The engine with the tiny model's weights, as version 3."""
    started.load_weights(weights.items(), 3)
    return started


def test_steps_of_several_threads_are_in_the_thread_that_trains(engine, monkeypatch):
    """The main thread waits for them; what is written is the same."""
    sampling, places, step = Sampling(max_tokens=12), [], engine._step

    def noted():
        places.append(threading.current_thread().name)
        return step()

    async def run():
        return await asyncio.gather(*(engine.generate(p, sampling, 7) for p in PROMPTS))

    monkeypatch.setattr(engine, "_step", noted)
    expected = run_async(run())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    alone, places[:] = set(places), []
    assert same_draws(run_async(run()), expected)
    assert (alone, set(places)) == ({"lightning_rl"}, {"MainThread"})


SAMPLINGS = [
    Sampling(max_tokens=16, temperature=0.7),
    Sampling(max_tokens=16, temperature=1.3, top_k=3),
    Sampling(max_tokens=16, top_p=0.6),
    Sampling(max_tokens=16, temperature=0.8, top_k=5, top_p=0.8, min_tokens=4),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_logprobs_are_of_the_distribution_sampled_from(tiny_model, weights, engine, sampling):
    plain = plain_model(tiny_model, weights)
    tokens = 0
    for prompt, completion in zip(
        PROMPTS * 4, generate(engine, PROMPTS * 4, sampling), strict=True
    ):
        expected = true_logprobs(plain, prompt, completion.token_ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
        tokens += len(expected)
    assert tokens > 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM computes on the GPU")
def test_norms_and_swiglu_are_the_kernels_for_cpus(engine):
    def vllms_own(model):
        layers = [m for m in model.modules() if type(m).__name__ in ("RMSNorm", "SiluAndMul")]
        return [inspect.ismethod(layer._forward_method) for layer in layers]

    assert engine._llm.apply_model(vllms_own) == [[False] * 7]  # two layers of three, and the last


def test_completions_end_as_they_say(engine):
    sampling = Sampling(max_tokens=5, temperature=2.0)
    completions = generate(engine, PROMPTS * 10, sampling)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions)
        assert set(c.versions) == {3}
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == 1)
        assert len(c.token_ids) == 5 or c.finish_reason == "stop"


def test_min_tokens_holds_the_end_back(engine):
    sampling = Sampling(max_tokens=8, min_tokens=6, temperature=2.0)
    assert min(len(c.token_ids) for c in generate(engine, PROMPTS * 10, sampling)) >= 6


def test_stop_strings_end_a_completion_and_stay_in_it(engine):
    sampling = Sampling(max_tokens=50, temperature=2.0, stop=["="])
    stopped = [c for c in generate(engine, PROMPTS * 4, sampling) if 2 in c.token_ids]
    assert stopped
    for c in stopped:
        assert c.token_ids.index(2) == len(c.token_ids) - 1
        assert c.finish_reason == "stop"


def test_a_seed_gives_the_same_tokens_in_any_batch(engine):
    sampling = Sampling(max_tokens=12)
    alone = [generate(engine, [p], sampling, [s])[0] for s, p in enumerate(PROMPTS)]
    assert same_draws(generate(engine, PROMPTS, sampling), alone)
    order = [4, 2, 0, 3, 1]
    crowd = generate(engine, [PROMPTS[i] for i in order] + PROMPTS * 5, sampling, order + [99] * 25)
    assert same_draws(crowd[:5], [alone[i] for i in order])
    assert alone[0].token_ids != alone[4].token_ids  # one prompt, two seeds
    assert not same_draws([alone[0]] * 2, [alone[4]] * 2)


def test_more_prompt_tokens_than_one_step_takes(engine):
    """64 seeded prompts of 100 tokens: one of them would be cut at vLLM's limit for a step."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 13) for _ in range(100)] for _ in range(64)]
    sampling = Sampling(max_tokens=3)
    together = generate(engine, prompts, sampling)
    alone = [generate(engine, [prompts[i]], sampling, [i])[0] for i in (0, 20, 21, 63)]
    assert same_draws([together[i] for i in (0, 20, 21, 63)], alone)


def test_greedy_equals_the_transformers_engine(skeleton, weights, engine):
    reference = TransformersEngine(device="cpu")
    reference.start(skeleton)
    reference.load_weights(weights.items(), 0)
    greedy = Sampling(max_tokens=20, temperature=0)
    ours, theirs = (generate(e, PROMPTS, greedy) for e in (engine, reference))
    assert same_draws(ours, theirs)


def test_requests_join_and_leave_while_others_run(tiny_model, weights, engine):
    """A request that comes later ends earlier than one that was there before."""
    finished = []

    async def request(name, prompt, tokens, seed):
        sampling = Sampling(max_tokens=tokens, min_tokens=tokens)
        completion = await engine.generate(prompt, sampling, seed)
        finished.append(name)
        return completion

    async def run():
        long = asyncio.create_task(request("long", [3], 50, 1))
        for _ in range(5):  # let it make some steps
            await asyncio.sleep(0)
        short = asyncio.create_task(request("short", [4], 3, 2))
        return await asyncio.gather(long, short)

    long, short = asyncio.run(run())
    assert finished == ["short", "long"]
    # Neither noticed the other.
    plain = plain_model(tiny_model, weights)
    for prompt, completion, tokens in (([3], long, 50), ([4], short, 3)):
        sampling = Sampling(max_tokens=tokens, min_tokens=tokens)
        expected = true_logprobs(plain, prompt, completion.token_ids, sampling)
        assert len(expected) == tokens
        assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)


def test_a_cancelled_request_leaves_and_the_others_stay(tiny_model, weights, engine):
    sampling = Sampling(max_tokens=40, min_tokens=40)

    async def run():
        doomed = asyncio.create_task(engine.generate([3], sampling, 1))
        other = asyncio.create_task(engine.generate([4], sampling, 2))
        for _ in range(5):
            await asyncio.sleep(0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await other

    completion = asyncio.run(run())
    expected = true_logprobs(plain_model(tiny_model, weights), [4], completion.token_ids, sampling)
    assert len(expected) == 40
    assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
    assert not engine._llm.has_unfinished_requests()


def test_other_threads_draw_as_if_it_were_not_there(engine):
    """What is sampled, too, comes from seeds alone."""
    sampling = Sampling(max_tokens=100, min_tokens=100)
    expected = generate(engine, PROMPTS[:3], sampling)
    torch.manual_seed(5)
    alone = torch.stack([torch.rand(()) for _ in range(3000)])
    torch.manual_seed(5)
    drawn = []
    thread = threading.Thread(target=lambda: drawn.extend(torch.rand(()) for _ in range(3000)))
    thread.start()
    ours = generate(engine, PROMPTS[:3], sampling)
    thread.join()
    assert torch.equal(torch.stack(drawn), alone)
    assert same_draws(ours, expected)


IN_A_PROCESS = """
import sys
from pathlib import Path
import torch
from lightning_rl import Sampling, VLLMLocal
from lightning_rl.run.loop import run_async
from lightning_rl.models.policy import Policy

torch.set_num_threads(1)
engine = VLLMLocal(max_model_len=64, kv_cache_gb=0.05)
engine.start(Path(sys.argv[1]))
engine.load_weights(Policy(sys.argv[1]).named_weights(), 0)
completion = run_async(engine.generate([3, 4], Sampling(max_tokens=4, min_tokens=4), 0))
print(len(completion.token_ids), torch.get_num_threads())
engine.close()
torch.distributed.barrier(torch.distributed.new_group())
print(*(path.name[:10] for path in Path(sys.argv[2]).glob("vllm_dist_*")))
"""


def test_a_process_with_fewer_threads_for_torch_and_new_groups_after_the_engine(
    tiny_model, tmp_path
):
    """vLLM's attention counts both kinds of threads, and ends the process where they differ.

    Lightning makes a process group for each ``fit`` or ``predict``, and waits where it cannot; the
    engine's own outlive it, and leave no file.
    """
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, str(tiny_model), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "2", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.stdout.split() == ["4", "1", "vllm_dist_"], done.stderr[-2000:]
    assert not list(tmp_path.glob("vllm_dist_*"))


TRANSPORTS = {
    "memory": lambda tmp, **options: MemoryTransport(**options),
    "checkpoint": lambda tmp, **options: CheckpointTransport(str(tmp), **options),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_adapters_alone_make_the_merged_weights(tiny_model, tmp_path, engine, name):
    policy = Policy(str(tiny_model), lora=LoRA(rank=4, target_modules=["v_proj", "gate_proj"]))
    transport = TRANSPORTS[name](tmp_path, adapters_only=True)
    transport.connect(engine)
    for version in (4, 5):
        transport.push(transport.weights_of(policy), version)
        plain = plain_model(tiny_model, dict(policy.named_weights()))
        assert engine.version == version
        assert gap_on_a_cached_prompt(engine, plain) < ROUNDING
        for name, parameter in policy.named_parameters():  # what the second push brings
            if ".lora_" in name:
                torch.nn.init.normal_(
                    parameter, std=0.1, generator=torch.Generator().manual_seed(0)
                )
    transport.close()


@pytest.mark.parametrize("name", [*TRANSPORTS, "own"])
def test_a_push_replaces_all_weights(
    tiny_model, tmp_path, weights, changed, engine, own_transport, name
):
    sampling = Sampling(max_tokens=12, temperature=0.7)
    ways = TRANSPORTS | {"own": own_transport}
    transport = ways[name](tmp_path)
    transport.connect(engine)
    transport.push(weights.items(), 3)
    before = generate(engine, PROMPTS, sampling)
    transport.push(changed.items(), 4)
    transport.close()
    after = generate(engine, PROMPTS, sampling)
    assert [c.token_ids for c in before] != [c.token_ids for c in after]
    plain = plain_model(tiny_model, changed)
    for prompt, completion in zip(PROMPTS, after, strict=True):
        expected = true_logprobs(plain, prompt, completion.token_ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
        assert set(completion.versions) == {4}


def gap_on_a_cached_prompt(engine, plain) -> float:
    """Largest error of logprobs after a prompt of 70 tokens, which vLLM caches in blocks of 32."""
    sampling = Sampling(max_tokens=4, min_tokens=4)
    (completion,) = generate(engine, [LONG], sampling, [5])
    expected = true_logprobs(plain, LONG, completion.token_ids, sampling)
    return max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))


def test_a_push_drops_the_prefix_cache(monkeypatch, tiny_model, weights, changed, engine):
    old, new = plain_model(tiny_model, weights), plain_model(tiny_model, changed)
    assert gap_on_a_cached_prompt(engine, old) < ROUNDING  # fills the cache
    engine.load_weights(changed.items(), 4)
    assert gap_on_a_cached_prompt(engine, new) < ROUNDING
    # Without the reset the old keys and values poison what follows: that this test can fail.
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)
    engine.load_weights(weights.items(), 5)
    assert gap_on_a_cached_prompt(engine, old) > 1e-2
    monkeypatch.undo()
    engine.load_weights(weights.items(), 6)
    assert gap_on_a_cached_prompt(engine, old) < ROUNDING


def test_tokens_in_flight_keep_the_version_that_wrote_them(tiny_model, weights, changed, engine):
    sampling = Sampling(max_tokens=40, min_tokens=40)
    prompts = PROMPTS[:4]

    async def run():
        tasks = [
            asyncio.create_task(engine.generate(p, sampling, s)) for s, p in enumerate(prompts)
        ]
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.pause()
        engine.load_weights(changed.items(), 4)
        for _ in range(100):  # paused: nothing moves
            await asyncio.sleep(0)
        moved = any(task.done() for task in tasks)
        await engine.resume()
        assert not moved
        return await asyncio.gather(*tasks)

    plain = {3: plain_model(tiny_model, weights), 4: plain_model(tiny_model, changed)}
    for prompt, completion in zip(prompts, asyncio.run(run()), strict=True):
        # The versions are told apart: neither policy alone explains all tokens.
        for alone in require_switch(completion, prompt, plain, sampling):
            assert completion.logprobs != pytest.approx(alone, abs=1e-2)


def test_weights_that_do_not_fit_are_named(tiny_model, weights, changed, engine):
    # One part of what vLLM merges into a single weight.
    name = "model.layers.1.mlp.up_proj.weight"
    for pushed, message in (
        ({n: w for n, w in changed.items() if n != name}, rf"left out 1 .* first '{name}'"),
        (changed | {"visual.weight": torch.ones(1)}, r"brings 'visual\.weight' .* none of that"),
        (changed | {name: torch.ones(2, 2)}, rf"{name}' of shape \(2, 2\), .* is \(64, 64\)"),
    ):
        with pytest.raises(IncompleteWeightsError, match=message):
            engine.load_weights(pushed.items(), 4)
        with pytest.raises(EngineError, match="no trained weights"):  # some are new, some old
            generate(engine, [[3]], Sampling(max_tokens=1))
    engine.load_weights(weights.items(), 5)
    assert gap_on_a_cached_prompt(engine, plain_model(tiny_model, weights)) < ROUNDING


def test_a_push_holds_a_layer_at_a_time(weights, engine):
    """Of weights that are made as they are asked for, as where they are sharded or cast."""
    live, most = 0, 0

    def free(size):
        nonlocal live
        live -= size

    def made():
        nonlocal live, most
        for name, weight in weights.items():
            fresh = weight.clone()
            weakref.finalize(fresh.untyped_storage(), free, weight.nbytes)
            live += weight.nbytes
            most = max(most, live)
            yield name, fresh
            del fresh

    engine.load_weights(made(), 4)
    sizes = {"in the end": 0, "layer": 0}
    for name, weight in weights.items():
        # An embedding of 16 tokens, which vLLM pads to 64, waits until the end of the push.
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            sizes["in the end"] += weight.nbytes
        if name.startswith(("model.layers.1.mlp.gate", "model.layers.1.mlp.up")):  # one in vLLM
            sizes["layer"] += weight.nbytes
    total = sum(weight.nbytes for weight in weights.values())
    assert sizes["layer"] <= most <= sum(sizes.values()) < total / 2
    assert live == 0


def test_a_push_that_fails_inside_leaves_no_engine_to_generate_with(monkeypatch, weights, engine):
    """As when vLLM takes the names but not all of the weights."""
    norm = "model.norm.weight"
    monkeypatch.delitem(engine._shapes, norm)
    with pytest.raises(WeightSyncError, match=rf"left 1 of the engine's weights .* '{norm}'"):
        engine.load_weights({n: w for n, w in weights.items() if n != norm}.items(), 4)
    with pytest.raises(EngineError, match="no trained weights"):
        generate(engine, [[3]], Sampling(max_tokens=1))


def test_a_request_that_does_not_fit_is_refused(engine):
    with pytest.raises(EngineError, match=r"prompt of 120 tokens \+ max_tokens=9 exceeds .*128"):
        generate(engine, [[3] * 120], Sampling(max_tokens=9))


def close_in_the_middle(engine):
    """Of a request, from another thread, as a trainer does; the engine is paused besides."""

    async def run():
        request = asyncio.create_task(engine.generate([3], Sampling(max_tokens=100), 0))
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.pause()
        await asyncio.to_thread(engine.close)
        await engine.resume()
        await request

    asyncio.run(run())


def test_an_engine_can_be_closed_and_started_again_beside_another(
    tiny_model, skeleton, weights, engine
):
    """And neither life disturbs the process around it."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    hook, threads = sys.excepthook, {t.name for t in threading.enumerate()}
    expected = generate(engine, PROMPTS, Sampling(max_tokens=8))
    for _ in range(2):
        other = VLLMLocal(max_model_len=128, kv_cache_gb=0.05)
        with pytest.raises(EngineError, match="not running"):
            generate(other, [[3]], Sampling(max_tokens=1))
        other.start(skeleton)
        with pytest.raises(EngineError, match="no trained weights yet"):
            generate(other, [[3]], Sampling(max_tokens=1))
        other.load_weights(weights.items(), 0)
        assert same_draws(generate(other, PROMPTS, Sampling(max_tokens=8)), expected)
        with pytest.raises(EngineError, match="closed while it generated"):
            close_in_the_middle(other)
        other.close()
        assert not other.running
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1  # it still does something
    assert sys.excepthook is hook
    assert {t.name for t in threading.enumerate()} <= threads
    assert same_draws(generate(engine, PROMPTS, Sampling(max_tokens=8)), expected)


def test_what_is_closed_is_gone(skeleton, weights, thawed):
    """Model, runner and key/value cache: on a GPU, the memory that the next run needs."""
    engine = VLLMLocal(max_model_len=64, kv_cache_gb=0.05)
    engine.start(skeleton)
    engine.load_weights(weights.items(), 0)
    generate(engine, PROMPTS[:2], Sampling(max_tokens=4))
    worker = engine._llm.model_executor.driver_worker.worker
    cache = worker.model_runner.kv_caches
    assert sum(block.nbytes for block in cache) > 40 * 2**20
    parts = {
        "engine": engine._llm,
        "worker": worker,
        "runner": worker.model_runner,
        "model": worker.get_model(),
        **{f"parameter {name}": p for name, p in worker.get_model().named_parameters()},
        **{f"cache of layer {layer}": block for layer, block in enumerate(cache)},
    }
    left = {name: weakref.ref(part) for name, part in parts.items()}
    frozen = gc.get_freeze_count()
    del worker, cache, parts
    engine.close()
    assert [name for name, part in left.items() if part() is not None] == []
    assert frozen > 0
    assert gc.get_freeze_count() == 0
    assert torch.distributed.is_initialized()  # what Lightning trains with stays


def test_impossible_settings_are_refused(tmp_path, skeleton):
    with pytest.raises(ConfigError, match="dtype='int8' must be"):
        VLLMLocal(dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"float16.* not for CPUs"):
            VLLMLocal(dtype="float16").start(skeleton)
    with pytest.raises(
        EngineError,
        match=r"did not start: User-specified max_model_len \(10000\) is greater [^\[]*$",
    ):
        VLLMLocal(max_model_len=10_000).start(skeleton)
