"""Test the fault table of two real vLLM servers: what is broken, and what comes of it.

A line of docs/sync.md is a ``with fault(...)`` block here (``python -m benchmarks.faults``). Every
test pushes first. It takes minutes: servers that were killed start anew, and others are waited for.

Slow: most faults end a vLLM server, and each takes half a minute to start anew.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import benchmarks.kill
from lightning_rl.engines import Sampling, VLLMServer
from lightning_rl.engines.replicas.server_access import CLAIM
from lightning_rl.errors import (
    DamagedWeightsError,
    EngineError,
    IncompleteWeightsError,
    ReplicaError,
)
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.loop.background import run_async, runtime
from lightning_rl.serving import ScriptAgent
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import (
    PROMPTS,
    ROUNDING,
    Forgetful,
    connected,
    gap,
    generate,
    is_running,
    plain_model,
    processes_of,
    require_idle,
    same_draws,
    scaled,
    train_adapters,
    wait_for,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),  # a hang is a failure
]

KEY = "LIGHTNING_RL_TEST_KEY"
PROGRAM = Path(benchmarks.kill.__file__).with_name("program.py")


@pytest.fixture
def engine(servers):
    yield servers
    wait_for(lambda: all(replica.alive for replica in servers.replicas))
    require_idle(servers)


def engine_core(replica) -> int:
    """Return the process that takes the steps of a push; the server before it goes on answering."""
    names = {
        pid: Path(f"/proc/{pid}/comm").read_text()
        for pid in processes_of(replica._process._process.pid)
    }
    return next(pid for pid, name in names.items() if "EngineCore" in name or "Engine" in name)


def test_a_skipped_layer_is_named(tiny_model, weights, engine, fault):
    layer = "model.layers.1.mlp.up_proj.weight"
    with fault(
        "a layer left out of the push",
        "naming it; the engine generates nothing until the next push",
        IncompleteWeightsError,
        f"lacks 1 .* '{layer}'",
    ):
        engine.load_weights({n: w for n, w in weights.items() if n != layer}.items(), 1)
    with pytest.raises(EngineError, match="no trained weights"):
        generate(engine, [[3]], Sampling(max_tokens=1))

    with (
        connected(Forgetful(), engine) as transport,
        fault(
            "tensors lost on the way",
            "naming them, from vLLM's worker",
            IncompleteWeightsError,
            "left 5 of the engine's weights unchanged",
        ),
    ):
        transport.push(weights.items(), 1)
    engine.load_weights(weights.items(), 2)
    assert gap(engine.replicas[1], plain_model(tiny_model, weights)) < ROUNDING


def test_a_truncated_file_is_named(tiny_model, tmp_path, weights, engine, fault):
    class Truncating(CheckpointTransport):
        def stage(self, part):
            bucket = super().stage(part)
            os.truncate(bucket["path"], os.path.getsize(bucket["path"]) - 1000)
            return bucket

    with (
        connected(Truncating(str(tmp_path)), engine) as transport,
        fault(
            "a file cut short",
            "naming it; the next push puts it right",
            DamagedWeightsError,
            r"00000001-0000\.safetensors cannot be read",
        ),
    ):
        transport.push(weights.items(), 1)
    with connected(CheckpointTransport(str(tmp_path)), engine) as transport:
        transport.push(weights.items(), 2)
    assert gap(engine.replicas[0], plain_model(tiny_model, weights)) < ROUNDING


def test_a_cache_that_is_not_reset_shows(monkeypatch, tiny_model, weights, engine, fault):
    """The probe after each sync can fail: here it does."""
    replica = engine.replicas[0]
    engine.load_weights(weights.items(), 1)
    gap(replica, plain_model(tiny_model, weights))  # fills the cache
    call = replica._call

    async def no_reset(method, path, *args, **query):
        return {"success": True} if "reset" in path else await call(method, path, *args, **query)

    monkeypatch.setattr(replica, "_call", no_reset)
    changed = scaled(weights, 0.8)
    plain = plain_model(tiny_model, changed)
    happened = "logprobs off by more than 0.01 on a cached prompt, as the probe compares them"
    with fault("the prefix cache not reset", happened):
        engine.load_weights(changed.items(), 2)
        assert gap(replica, plain) > 1e-2


def test_a_stuck_peer_that_is_not_ours_is_waited_for(
    monkeypatch, tiny_model, skeleton, weights, engine, fault
):
    """A server as somebody else's, by its URL: it hangs in a push, and a network can be cut so."""
    engine.load_weights(weights.items(), 1)
    replica = engine.replicas[0]
    monkeypatch.setenv(KEY, replica._headers["Authorization"].removeprefix("Bearer "))
    visitor = VLLMServer(
        urls=[replica.name], api_key_env=KEY, health_every_s=60, call_timeout_s=3,
        recovery_timeout_s=200,
    )  # fmt: skip
    run_async(replica._call("DELETE", CLAIM))  # or it is no visitor's
    visitor.start(skeleton)
    theirs = visitor.replicas[0]
    hung = engine_core(replica)
    try:
        with connected(CollectiveTransport(timeout_s=3), visitor) as transport:
            transport.push(scaled(weights, 0.9).items(), 1)
            os.kill(hung, signal.SIGSTOP)
            with fault(
                "a server of somebody else hangs (`SIGSTOP`) in a push",
                "left out after the timeout, here 3 s; requests wait for it",
            ):
                transport.push(scaled(weights, 0.8).items(), 2)
                assert theirs.version < 2  # the visitor may be trying at this moment to reach it
            waiting = asyncio.run_coroutine_threadsafe(
                visitor.generate(PROMPTS[0], Sampling(max_tokens=4), 0), runtime.loop
            )
            with fault("the same, and it goes on", "filled with that push, and asked"):
                os.kill(hung, signal.SIGCONT)
                assert set(waiting.result(200).versions) == {2}
            assert gap(theirs, plain_model(tiny_model, scaled(weights, 0.8))) < ROUNDING
            transport.push(scaled(weights, 0.7).items(), 3)
        assert gap(theirs, plain_model(tiny_model, scaled(weights, 0.7))) < ROUNDING
    finally:
        os.kill(hung, signal.SIGCONT)
        visitor.close()
        run_async(replica._claim())
    assert is_running(hung)  # it was not ours to end


def test_a_replica_that_dies_in_the_middle_of_a_push(tiny_model, engine, fault):
    """The other one is served, and itself comes back with the base and that push's adapters."""
    lora_policy = Policy(str(tiny_model), lora=LoRA(rank=4, target_modules=["v_proj"]))
    doomed, other = engine.replicas
    life = doomed.life

    class Murderous(CollectiveTransport):
        def broadcast(self, bucket):
            if doomed.version == 6:
                doomed._process.kill()
            super().broadcast(bucket)

    with connected(Murderous(timeout_s=60, adapters_only=True), engine) as transport:
        transport.push(transport.weights_of(lora_policy), 6)
        merged = train_adapters(lora_policy, 7)
        plain = plain_model(tiny_model, merged)
        with fault("a server killed in the middle of a broadcast", "the push reaches the other"):
            transport.push(transport.weights_of(lora_policy), 7)
            assert gap(other, plain) < ROUNDING
        with fault("the same", "it is started anew and filled with that push"):
            sampling = Sampling(max_tokens=8)
            assert all(set(c.versions) == {7} for c in generate(engine, PROMPTS * 2, sampling))
            wait_for(lambda: doomed.version == 7)
        assert doomed.life == life + 1
        assert gap(doomed, plain) < ROUNDING


def test_requests_outlive_the_replica_that_they_were_sent_to(weights, engine, fault):
    with connected(MemoryTransport(), engine) as transport:
        transport.push(weights.items(), 5)
        sampling = Sampling(max_tokens=100, min_tokens=100)
        expected = generate(engine, PROMPTS[:3] * 4, sampling)

        async def kill_one():
            pairs = enumerate(PROMPTS[:3] * 4)
            tasks = [asyncio.create_task(engine.generate(p, sampling, s)) for s, p in pairs]
            await asyncio.sleep(0)  # each has chosen
            doomed = engine.replicas[1]
            assert doomed.load == 6
            await asyncio.to_thread(doomed._process.kill)
            return await asyncio.gather(*tasks)

        with fault("a server killed with six requests in flight", "the same tokens, by the other"):
            assert same_draws(run_async(kill_one()), expected)
        wait_for(lambda: engine.replicas[1].version == 5)


def test_programs_outlive_the_replica_that_answers_them(tiny_model, weights, engine, fault):
    agent = ScriptAgent(str(PROGRAM), preload=["urllib.request"])
    agent.configure(AutoTokenizer.from_pretrained(tiny_model))

    async def play(killing: bool) -> list[Rollout]:
        prompts = [Prompt(str(n), f"{n}=", [3 + n, 2]) for n in range(8)]
        rollouts = [Rollout(prompt, prompt.id, 0, 50) for prompt in prompts]
        runs = [asyncio.create_task(agent.run(r, engine, Sampling(max_tokens=8))) for r in rollouts]
        if killing:
            while not engine.replicas[1].load:
                await asyncio.sleep(0)
            await asyncio.to_thread(engine.replicas[1]._process.kill)
        await asyncio.gather(*runs)
        return rollouts

    with connected(MemoryTransport(), engine) as transport:
        transport.push(weights.items(), 5)
        try:
            expected = run_async(play(killing=False))
            with fault("a server killed under eight programs", "the same rollouts"):
                again = run_async(play(killing=True))
        finally:
            agent.close()
        assert all(rollout.completed and len(rollout.calls) == 2 for rollout in expected)
        assert same_draws(again, expected)
        for ours, theirs in zip(again, expected, strict=True):
            if ours.token_ids == theirs.token_ids:
                assert [c.seed for c in ours.calls] == [c.seed for c in theirs.calls]
        wait_for(lambda: engine.replicas[1].version == 5)


def test_when_all_replicas_are_gone_there_is_an_error_in_time(monkeypatch, weights, engine, fault):
    with connected(MemoryTransport(), engine) as transport:
        transport.push(weights.items(), 5)
        monkeypatch.setattr(engine, "recovery_timeout_s", 1.0)
        for replica in engine.replicas:
            replica._process.kill()
        with fault(
            "all servers killed",
            "after `recovery_timeout_s`, here 1 s",
            ReplicaError,
            r"none of 2 replicas came back .*=1: http://127",
        ):
            generate(engine, [[3]], Sampling(max_tokens=1))
        monkeypatch.setattr(engine, "recovery_timeout_s", 200.0)
        with fault("the same, given time", "started, filled with the weights of then, and asked"):
            assert generate(engine, [[3]], Sampling(max_tokens=4))[0].versions[0] == 5
        wait_for(lambda: all(replica.version == 5 for replica in engine.replicas))


def shared_memory(session: int) -> set[str]:
    """Return files of shared memory that a server's processes use."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in processes_of(session)]
    return {word for text in maps for word in text.split() if word.startswith("/dev/shm/psm_")}


@pytest.mark.parametrize("first", ["nothing", "its keeper"])
def test_a_server_leaves_no_process_no_shared_memory_and_no_socket(skeleton, first, monkeypatch):
    # An engine in this process sets it, and a server would inherit it, and need no shared memory.
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    engine = VLLMServer(max_model_len=64, kv_cache_gb=0.01)
    engine.start(skeleton)
    process = engine.replicas[0]._process
    folder, session = Path(process._sockets.name), process.pid
    pids, shared = processes_of(session), shared_memory(session)
    assert len(pids) > 2
    assert shared
    assert list(folder.iterdir())
    if first == "its keeper":
        os.kill(session, signal.SIGKILL)
    engine.close()
    wait_for(lambda: not any(map(is_running, pids)))
    assert not folder.exists()
    wait_for(lambda: not any(Path(name).exists() for name in shared), 10)
