"""Test VLLMLocal beside a trainer in one process: threads, kernels, memory, starts and ends.

What it does as every engine does is in test_engine_contract.py.
"""

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
from transformers import AutoConfig

from lightning_rl.engines import RayEngine, Sampling, VLLMLocal, VLLMServer
from lightning_rl.errors import ConfigError, EngineError, WeightSyncError
from lightning_rl.run.loop.background import run_async
from tests.support.engine_checks import (
    PROMPTS,
    ROUNDING,
    gap,
    generate,
    plain_model,
    same_draws,
    scaled,
)


@pytest.fixture
def engine(vllm, weights):
    """Return the engine with the tiny model's weights, as version 3."""
    vllm.load_weights(weights.items(), 3)
    return vllm


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM computes on the GPU")
def test_norms_and_swiglu_are_the_kernels_for_cpus(engine):
    def vllms_own(model):
        layers = [m for m in model.modules() if type(m).__name__ in ("RMSNorm", "SiluAndMul")]
        return [inspect.ismethod(layer._forward_method) for layer in layers]

    assert engine._llm.apply_model(vllms_own) == [[False] * 7]  # two layers of three, and the last


def test_more_prompt_tokens_than_one_step_takes(engine):
    """64 seeded prompts of 100 tokens: one of them would be cut at vLLM's limit for a step."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 13) for _ in range(100)] for _ in range(64)]
    sampling = Sampling(max_tokens=3)
    together = generate(engine, prompts, sampling)
    alone = [generate(engine, [prompts[i]], sampling, [i])[0] for i in (0, 20, 21, 63)]
    assert same_draws([together[i] for i in (0, 20, 21, 63)], alone)


def test_other_threads_draw_as_if_it_were_not_there(engine):
    """The sampled tokens come from seeds alone, too."""
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


def test_a_push_drops_the_prefix_cache(monkeypatch, tiny_model, weights, engine):
    changed = scaled(weights, 0.8)
    old, new = plain_model(tiny_model, weights), plain_model(tiny_model, changed)
    assert gap(engine, old) < ROUNDING  # fills the cache
    engine.load_weights(changed.items(), 4)
    assert gap(engine, new) < ROUNDING
    # The old keys and values poison what follows without the reset, so this test can fail.
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)
    engine.load_weights(weights.items(), 5)
    assert gap(engine, old) > 1e-2


IN_A_PROCESS = """
import sys
from pathlib import Path
import torch
from lightning_rl import Sampling, VLLMLocal
from lightning_rl.run.loop.background import run_async
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


@pytest.mark.slow
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


def test_a_push_holds_a_layer_at_a_time(weights, engine):
    """The pushed weights are made as they are asked for, as where they are sharded or cast."""
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
    """vLLM takes the names here, but not all of the weights."""
    norm = "model.norm.weight"
    monkeypatch.delitem(engine._shapes, norm)
    with pytest.raises(WeightSyncError, match=rf"left 1 of the engine's weights .* '{norm}'"):
        engine.load_weights({n: w for n, w in weights.items() if n != norm}.items(), 4)
    with pytest.raises(EngineError, match="no trained weights"):
        generate(engine, [[3]], Sampling(max_tokens=1))


def close_in_the_middle(engine):
    """Close the paused engine during a request, from another thread, as a trainer does."""

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
    """Neither life disturbs the process around it."""
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
        with pytest.raises(EngineError, match="closed while generating"):
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


@pytest.mark.slow  # the collector looks through all there is, again and again
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
        with pytest.raises(ConfigError, match=r"float16.* not supported on CPUs"):
            VLLMLocal(dtype="float16").start(skeleton)
    with pytest.raises(
        EngineError,
        match=r"did not start: User-specified max_model_len \(10000\) is greater [^\[]*$",
    ):
        VLLMLocal(max_model_len=10_000).start(skeleton)


LOCAL = pytest.param(VLLMLocal, {}, id="VLLMLocal")
REPLICATED = [
    pytest.param(VLLMServer, {}, id="VLLMServer", marks=pytest.mark.slow),
    pytest.param(RayEngine, {"replicas": 1}, id="RayEngine", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "options"), [LOCAL, *REPLICATED])
def test_without_a_length_a_request_may_fill_the_cache_and_errors_name_our_keys(
    weights, skeleton, kind, options
):
    config = AutoConfig.from_pretrained(skeleton)
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    half = config.max_position_embeddings // 2
    options = options | {"kv_cache_gb": 2 * 4 * config.num_hidden_layers * width * half / 2**30}
    engine = kind(dtype="float32", **options)
    engine.start(skeleton)
    length = engine.max_length
    assert 3 < length <= half
    engine.load_weights(weights.items(), 0)
    fills = Sampling(max_tokens=length - 3, min_tokens=length - 3)
    completion = run_async(engine.generate([3, 4, 2], fills, 1))
    engine.close()
    assert len(completion.token_ids) == fills.max_tokens
    hint = r"KV cache, .*set engine\.kv_cache_gb to .*, or engine\.max_model_len to at most \d"
    engine = kind(dtype="float32", max_model_len=2 * half, **options)
    with pytest.raises(EngineError, match=hint) as failure:
        engine.start(skeleton)
    engine.close()
    assert "gpu_memory_utilization" not in str(failure.value)


def test_it_pauses_in_one_event_loop_after_another(engine):
    async def paused_once() -> int:
        await engine.pause()
        writing = asyncio.ensure_future(engine.generate([3, 4, 2], Sampling(max_tokens=2), 1))
        await asyncio.sleep(0.1)
        assert not writing.done()
        await engine.resume()
        return len((await writing).token_ids)

    assert 1 <= asyncio.run(paused_once()) == asyncio.run(paused_once())
