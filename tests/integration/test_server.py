"""Test VLLMServer with two real servers: requests, and pushes by every transport.

Every test pushes first, so each finds the engine as it wants it, whatever the one before did.
What it does as every engine does is in test_engine_contract.py, and its faults are
in test_server_faults.py.

Slow: two of its tests start servers of their own, one of them as the documentation says.
"""

import asyncio
import re
import shutil
import sys
from pathlib import Path

import aiohttp
import pytest

from lightning_rl.engines import Sampling, StructuredOutputs, VLLMServer
from lightning_rl.engines.replicas.server_process import ServerProcess, free_port
from lightning_rl.errors import ReplicaError, WeightSyncError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.base import push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights
from tests.support.engine_checks import (
    PROMPTS,
    ROUNDING,
    connected,
    gap,
    generate,
    plain_model,
    require_idle,
    scaled,
    train_adapters,
)

pytestmark = [pytest.mark.timeout(500)]

KEY = "LIGHTNING_RL_TEST_KEY"


@pytest.fixture
def engine(servers):
    yield servers
    require_idle(servers)


@pytest.mark.slow
def test_an_option_that_vllm_does_not_know_is_named(skeleton):
    engine = VLLMServer(max_model_len=128, kv_cache_gb=0.05, options={"max_num_seqz": 3})
    expected = r"unrecognized arguments: --max-num-seqz; unless .* `lightning-rl doctor`"
    with pytest.raises(ReplicaError, match=expected):
        engine.start(skeleton)
    engine.close()


# -------------------------------------------------------------------- tokens


def test_a_form_that_completions_are_held_to(weights, engine):
    engine.load_weights(weights.items(), 3)
    form = StructuredOutputs(regex="[357]{3}")  # tokens 6, 8 and 10
    for completion in generate(engine, PROMPTS, Sampling(max_tokens=8, structured_outputs=form)):
        *digits, end = completion.token_ids
        assert len(digits) == 3
        assert set(digits) <= {6, 8, 10}
        assert end == 1


def test_requests_go_to_the_replica_with_the_fewest(weights, engine):
    engine.load_weights(weights.items(), 0)

    async def run():
        sampling = Sampling(max_tokens=100, min_tokens=100)
        tasks = [asyncio.create_task(engine.generate([3], sampling, s)) for s in range(10)]
        await asyncio.sleep(0)  # each has chosen
        loads = [replica.load for replica in engine.replicas]
        for task in tasks[:9]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return loads, tasks[9].result()

    loads, last = run_async(run())
    assert loads == [5, 5]
    assert len(last.token_ids) == 100  # others that leave do not disturb it
    assert [replica.load for replica in engine.replicas] == [0, 0]


def test_every_path_but_health_demands_the_key(engine):
    async def status(path):
        url = f"{engine.replicas[0].name}{path}"
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
            return answer.status

    for path in ("/pause", "/collective_rpc", "/update_weights", "/inference/v1/generate"):
        assert run_async(status(path)) == 401


# -------------------------------------------------------------------- pushes


def slow(way):
    return pytest.param(way, marks=pytest.mark.slow)


# Memory and files are tested as for every engine: test_engine_contract.py.
TRANSPORTS = {
    "collective": lambda tmp: CollectiveTransport(bucket_mb=0.05),
    "memory_two_buckets": lambda tmp: MemoryTransport(bucket_mb=0.05, keep_copy=False),
    "checkpoint_many_files": lambda tmp: CheckpointTransport(str(tmp), bucket_mb=0.05),
    "collective_two_buckets": lambda tmp: CollectiveTransport(bucket_mb=0.05, keep_copy=False),
}


@pytest.mark.parametrize("name", [next(iter(TRANSPORTS)), *map(slow, list(TRANSPORTS)[1:])])
def test_a_push_replaces_all_weights_of_all_replicas(tiny_model, tmp_path, weights, engine, name):
    layer = "model.layers.1.self_attn.q_proj.weight"  # a part of what vLLM fuses
    states = [weights, scaled(weights, 0.8), scaled(weights, 0.6)]
    states.append(states[-1] | {layer: weights[layer] * 2})
    with connected(TRANSPORTS[name](tmp_path), engine) as transport:
        for version, state in enumerate(states):
            transport.push(state.items(), version)
            plain = plain_model(tiny_model, state)
            for replica in engine.replicas:
                assert replica.version == version
                assert gap(replica, plain) < ROUNDING
        assert gap(engine.replicas[0], plain_model(tiny_model, states[2])) > 1e-2


def test_a_transport_that_servers_cannot_import_is_named(tmp_path, weights, engine, own_transport):
    class Elsewhere(own_transport):
        """A class of a module that only this process has."""

        __module__, __qualname__ = "only_here", "Elsewhere"
        fetch = staticmethod(own_transport.fetch)

    with connected(Elsewhere(str(tmp_path)), engine) as transport:
        with pytest.raises(WeightSyncError, match=r"cannot import the transport: .*Elsewhere"):
            transport.push(weights.items(), 0)
        assert engine.version == -1


@pytest.fixture
def lora_policy(tiny_model):
    """Return a policy with a LoRA on one part of each layer that vLLM fuses."""
    return Policy(str(tiny_model), lora=LoRA(rank=4, target_modules=["v_proj", "gate_proj"]))


def test_adapters_alone_are_merged_by_all_replicas(tiny_model, lora_policy, engine):
    """A collective transport does as each engine's own ones do; the second push brings no base."""
    transport = CollectiveTransport(bucket_mb=0.05, adapters_only=True)
    with connected(transport, engine):
        for version in (0, 1):
            merged = train_adapters(lora_policy, version)
            transport.push(transport.weights_of(lora_policy), version)
            plain = plain_model(tiny_model, merged)
            for replica in engine.replicas:
                assert replica.version == version
                assert gap(replica, plain) < ROUNDING
        base = plain_model(tiny_model, dict(lora_policy.named_base_weights()))
        assert gap(engine.replicas[0], base) > 1e-2


@pytest.mark.parametrize("kind", [MemoryTransport, slow(CollectiveTransport)])
def test_what_is_frozen_is_pushed_to_all_replicas_once(tiny_model, engine, kind):
    """All layers of a merged LoRA are compared; those that are not adapted are pushed once."""
    policy = Policy(str(tiny_model), lora=LoRA(rank=4, target_modules=["v_proj"]))
    sent, whole = SentWeights(), len(dict(policy.named_weights()))
    with connected(kind(), engine) as transport:
        for version in range(3):
            merged = train_adapters(policy, version)
            assert push(transport, engine, policy, version, sent) == 2 * whole
            plain = plain_model(tiny_model, merged)
            assert all(gap(replica, plain) < ROUNDING for replica in engine.replicas)
        left_out = transport.weights_of(policy).kept
        assert "model.embed_tokens.weight" in left_out
        assert not any(".self_attn." in name for name in left_out)


@pytest.mark.slow
def test_a_server_started_as_the_page_says_can_be_worked_with(
    monkeypatch, tiny_model, skeleton, weights, tmp_path
):
    """The command for GPUs, and what it says to add on CPUs. It stops at ends that it is told."""
    page = (Path(__file__).parents[2] / "docs" / "sync.md").read_text("utf-8")
    section = page.partition("### Existing servers")[2]
    command, further = re.findall(r"```text\n(.*?)```", section, re.DOTALL)[:2]
    port = free_port()
    monkeypatch.setenv(KEY, "secret")
    script = f"{command.strip()} \\\n{further.strip()} --port {port} --host 127.0.0.1\n"
    script = script.replace("VLLM_API_KEY=...", "VLLM_API_KEY=secret VLLM_PLUGINS=")
    script = script.replace("MODEL ", f"{skeleton} ").replace(
        "python -m", f"exec {sys.executable} -m"
    )
    server = ServerProcess(["bash", "-c", script], {})
    options = {"api_key_env": KEY, "dtype": "float32", "start_timeout_s": 400, "health_every_s": 1}
    visitor, another = (VLLMServer(urls=[f"http://127.0.0.1:{port}"], **options) for _ in range(2))
    try:
        ends = shutil.copytree(skeleton, tmp_path / "ends")
        (ends / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
        visitor.start(ends)
        visitor.load_weights(weights.items(), 1)
        assert gap(visitor.replicas[0], plain_model(tiny_model, weights), (1, 5)) < ROUNDING
        made = generate(visitor, PROMPTS * 20, Sampling(max_tokens=8, temperature=2.0))
        assert not any({1, 5} & set(one.token_ids[:-1]) for one in made)
        assert {one.token_ids[-1] for one in made if one.finish_reason == "stop"} == {1, 5}
        with pytest.raises(ReplicaError, match="is used by another training run"):
            another.start(skeleton)
    finally:
        visitor.close()
        server.kill()
