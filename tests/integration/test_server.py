"""VLLMServer with two real servers: tokens, versions, pushes by every transport, and faults.

Every test pushes first, so each finds the engine as it wants it, whatever the one before did.
"""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from transformers import AutoTokenizer

import benchmarks
from lightning_rl.engines import Sampling, StructuredOutputs, VLLMServer
from lightning_rl.engines.server_access import CLAIM
from lightning_rl.engines.server_process import ServerProcess, free_port
from lightning_rl.errors import (
    DamagedWeightsError,
    EngineError,
    IncompleteWeightsError,
    ReplicaError,
    WeightSyncError,
)
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.loop import run_async, runtime
from lightning_rl.serving import ScriptAgent
from lightning_rl.sync.base import push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights
from lightning_rl.sync.shared import SharedCollectiveTransport
from tests.support.engine_checks import (
    LONG,
    PROMPTS,
    ROUNDING,
    Forgetful,
    connected,
    generate,
    is_running,
    plain_model,
    same_draws,
    scaled,
    train_adapters,
    true_logprobs,
    wait_for,
)

pytestmark = pytest.mark.timeout(240)  # a hang is a failure

KEY = "LIGHTNING_RL_TEST_KEY"
PROGRAM = Path(benchmarks.__file__).with_name("kill_program.py")


@pytest.fixture(scope="module")
def engine(skeleton, own_transport):
    engine = VLLMServer(
        replicas=2, max_model_len=128, kv_cache_gb=0.05, health_every_s=1.0, recovery_timeout_s=200
    )
    engine.start(skeleton)
    yield engine
    pids = [pid for replica in engine.replicas for pid in processes(replica)]
    assert len(pids) >= 6  # for each: keeper, server, engine
    engine.close()
    wait_for(lambda: not [pid for pid in pids if is_running(pid)])


def test_an_option_that_vllm_does_not_know_is_named(skeleton):
    engine = VLLMServer(max_model_len=128, kv_cache_gb=0.05, options={"max_num_seqz": 3})
    expected = (
        r"start: \S+: error: unrecognized arguments: --max-num-seqz; if .* `lightning-rl doctor`"
    )
    with pytest.raises(ReplicaError, match=expected):
        engine.start(skeleton)
    engine.close()


def gap(replica, plain) -> float:
    """Largest error of a replica's logprobs after a prompt that it caches in blocks."""
    sampling = Sampling(max_tokens=4, min_tokens=4)
    completion = run_async(replica.generate(LONG, sampling, 5))
    expected = true_logprobs(plain, LONG, completion.token_ids, sampling)
    return max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))


def processes(replica) -> list[int]:
    """All processes of a replica's session."""
    leader = replica._process._process.pid
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if sid(pid) == leader]


def sid(pid) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def engine_core(replica) -> int:
    """The process that takes the steps of a push; the server before it goes on answering."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in processes(replica)}
    return next(pid for pid, name in names.items() if "EngineCore" in name or "Engine" in name)


# -------------------------------------------------------------------- tokens


def test_a_form_that_completions_are_held_to(weights, engine):
    engine.load_weights(weights.items(), 3)
    form = StructuredOutputs(regex="[357]{3}")  # tokens 6, 8 and 10
    for completion in generate(engine, PROMPTS, Sampling(max_tokens=8, structured_outputs=form)):
        *digits, end = completion.token_ids
        assert len(digits) == 3
        assert set(digits) <= {6, 8, 10}
        assert end == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=16, temperature=0.7),
        Sampling(max_tokens=16, temperature=1.3, top_k=3, min_tokens=3),
        Sampling(max_tokens=16, min_p=0.1, repetition_penalty=1.3, frequency_penalty=0.4),
        Sampling(max_tokens=16, temperature=0.8, presence_penalty=-0.6),
    ],
)
def test_tokens_logprobs_and_seeds(tiny_model, weights, engine, sampling):
    engine.load_weights(weights.items(), 3)
    plain = plain_model(tiny_model, weights)
    together = generate(engine, PROMPTS * 4, sampling)
    for prompt, completion in zip(PROMPTS * 4, together, strict=True):
        expected = true_logprobs(plain, prompt, completion.token_ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
        assert completion.versions == [3] * len(expected)
        ended = completion.token_ids[-1] == 1
        assert completion.finish_reason == ("stop" if ended else "length")
    some = (0, 3, 13)  # alone, and so by whichever replica, the same tokens
    alone = [generate(engine, [PROMPTS[i % 5]], sampling, [i])[0] for i in some]
    assert same_draws(alone, [together[i] for i in some])


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


def test_stop_strings_end_a_completion_and_stay_in_it(weights, engine):
    engine.load_weights(weights.items(), 0)
    sampling = Sampling(max_tokens=50, temperature=2.0, stop=["="])
    stopped = [c for c in generate(engine, PROMPTS * 4, sampling) if 2 in c.token_ids]
    assert stopped
    for c in stopped:
        assert c.token_ids.index(2) == len(c.token_ids) - 1
        assert c.finish_reason == "stop"


def test_tokens_in_flight_keep_the_version_that_wrote_them(tiny_model, weights, engine):
    sampling = Sampling(max_tokens=120, min_tokens=120)
    prompts = PROMPTS[:3]
    changed = scaled(weights, 0.8)
    plain = {3: plain_model(tiny_model, weights), 4: plain_model(tiny_model, changed)}

    async def start(seconds):
        tasks = [
            asyncio.create_task(engine.generate(p, sampling, s)) for s, p in enumerate(prompts)
        ]
        await asyncio.sleep(seconds)
        await engine.pause()
        return tasks

    async def finish(tasks):
        await engine.resume()
        return await asyncio.gather(*tasks)

    def interrupted(seconds):
        """Completions, with the second push this long after their start."""
        engine.load_weights(weights.items(), 3)
        tasks = run_async(start(seconds))
        try:
            engine.load_weights(changed.items(), 4)
        finally:
            completions = run_async(finish(tasks))
        return completions

    def check(prompt, completion):
        """Each token by the version said, and no token of the old one after the new one."""
        switch = completion.versions.count(3)
        assert completion.versions == [3] * switch + [4] * (120 - switch)
        by_version = {
            v: true_logprobs(m, prompt, completion.token_ids, sampling) for v, m in plain.items()
        }
        expected = by_version[3][:switch] + by_version[4][switch:]
        assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
        return 10 < switch < 110  # of these, neither version alone could have written all

    # Whether the push finds a completion before, in or after its tokens depends on the machine.
    mixed = 0
    for seconds in 2 * (0.01, 0.02, 0.04, 0.06, 0.09, 0.13, 0.2, 0.3):
        mixed += sum(map(check, prompts, interrupted(seconds)))
        if mixed > 1:
            break
    assert mixed


def test_every_path_but_health_demands_the_key(engine):
    async def status(path):
        url = f"{engine.replicas[0].name}{path}"
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
            return answer.status

    for path in ("/pause", "/collective_rpc", "/update_weights", "/inference/v1/generate"):
        assert run_async(status(path)) == 401


# -------------------------------------------------------------------- pushes


TRANSPORTS = {
    "memory": lambda tmp: MemoryTransport(),
    "memory_two_buckets": lambda tmp: MemoryTransport(bucket_mb=0.05, keep_copy=False),
    "memory_changed_only": lambda tmp: MemoryTransport(bucket_mb=0.05, changed_only=True),
    "checkpoint": lambda tmp: CheckpointTransport(str(tmp)),
    "checkpoint_changed_only": lambda tmp: CheckpointTransport(str(tmp), changed_only=True),
    "collective": lambda tmp: CollectiveTransport(),
    "shared": lambda tmp: SharedCollectiveTransport(bucket_mb=0.05),
    "collective_two_buckets": lambda tmp: CollectiveTransport(bucket_mb=0.05, keep_copy=False),
    "collective_changed_only": lambda tmp: CollectiveTransport(bucket_mb=0.05, changed_only=True),
}
ADAPTERS = {
    "memory": lambda tmp: MemoryTransport(adapters_only=True),
    "checkpoint": lambda tmp: CheckpointTransport(str(tmp), adapters_only=True),
    "collective": lambda tmp: CollectiveTransport(bucket_mb=0.05, adapters_only=True),
}


@pytest.mark.parametrize("name", TRANSPORTS)
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


def test_a_transport_of_ones_own_reaches_all_replicas(
    tiny_model, tmp_path, weights, engine, own_transport
):
    with connected(own_transport(str(tmp_path)), engine) as transport:
        for version, factor in enumerate((1.0, 0.8)):
            state = scaled(weights, factor)
            transport.push(state.items(), version)
            plain = plain_model(tiny_model, state)
            assert all(gap(replica, plain) < ROUNDING for replica in engine.replicas)


def test_a_transport_that_servers_cannot_import_is_named(tmp_path, weights, engine, own_transport):
    class Elsewhere(own_transport):
        """Of a module that only this process has."""

        __module__, __qualname__ = "only_here", "Elsewhere"
        fetch = staticmethod(own_transport.fetch)

    with connected(Elsewhere(str(tmp_path)), engine) as transport:
        with pytest.raises(WeightSyncError, match=r"cannot import its end: .*Elsewhere"):
            transport.push(weights.items(), 0)
        assert engine.version == -1


@pytest.fixture
def lora_policy(tiny_model):
    """Of each layer that vLLM fuses, one part is adapted."""
    return Policy(str(tiny_model), lora=LoRA(rank=4, target_modules=["v_proj", "gate_proj"]))


@pytest.mark.parametrize("name", ["memory", "checkpoint", "collective"])
def test_adapters_alone_are_merged_by_all_replicas(tiny_model, tmp_path, lora_policy, engine, name):
    """Float32 logprobs as those of the merged weights; the second push brings no base."""
    with connected(ADAPTERS[name](tmp_path), engine) as transport:
        for version in (0, 1):
            merged = train_adapters(lora_policy, version)
            transport.push(transport.weights_of(lora_policy), version)
            plain = plain_model(tiny_model, merged)
            for replica in engine.replicas:
                assert replica.version == version
                assert gap(replica, plain) < ROUNDING
        base = plain_model(tiny_model, dict(lora_policy.named_base_weights()))
        assert gap(engine.replicas[0], base) > 1e-2


@pytest.mark.parametrize("name", ["memory", "collective"])
def test_what_is_frozen_is_pushed_to_all_replicas_once(tiny_model, tmp_path, engine, name):
    """Of a LoRA that is merged, all layers but those that are adapted; each is compared."""
    policy = Policy(str(tiny_model), lora=LoRA(rank=4, target_modules=["v_proj"]))
    sent, whole = SentWeights(), len(dict(policy.named_weights()))
    with connected(TRANSPORTS[name](tmp_path), engine) as transport:
        for version in range(3):
            merged = train_adapters(policy, version)
            assert push(transport, engine, policy, version, sent) == 2 * whole
            plain = plain_model(tiny_model, merged)
            assert all(gap(replica, plain) < ROUNDING for replica in engine.replicas)
        left_out = [n for n, weight in transport.weights_of(policy) if weight.is_meta]
        assert "model.embed_tokens.weight" in left_out
        assert not any(".self_attn." in name for name in left_out)


# -------------------------------------------------------------------- faults


def test_a_skipped_layer_is_named(tiny_model, weights, engine, fault):
    layer = "model.layers.1.mlp.up_proj.weight"
    with fault(
        "a layer left out of the push",
        "naming it; the engine generates nothing until the next push",
        IncompleteWeightsError,
        f"left out 1 .* '{layer}'",
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
            "left 5 of the engine's weights as they were",
        ),
    ):
        transport.push(weights.items(), 1)
    engine.load_weights(weights.items(), 2)
    assert gap(engine.replicas[1], plain_model(tiny_model, weights)) < ROUNDING


def test_a_truncated_file_is_named(tiny_model, tmp_path, weights, engine, fault):
    class Truncating(CheckpointTransport):
        def _write(self, *args):
            path = super()._write(*args)
            os.truncate(path, os.path.getsize(path) - 1000)
            return path

    with (
        connected(Truncating(str(tmp_path)), engine) as transport,
        fault(
            "a file cut short",
            "naming it; the next push puts it right",
            DamagedWeightsError,
            r"00000001\.safetensors cannot be read",
        ),
    ):
        transport.push(weights.items(), 1)
    with connected(CheckpointTransport(str(tmp_path)), engine) as transport:
        transport.push(weights.items(), 2)
    assert gap(engine.replicas[0], plain_model(tiny_model, weights)) < ROUNDING


def test_a_cache_that_is_not_reset_shows(monkeypatch, tiny_model, weights, engine, fault):
    """What the probe after each sync sees: that it can fail."""
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
                assert not visitor.replicas[0].alive
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


@pytest.mark.slow
def test_a_server_started_as_the_page_says_can_be_worked_with(
    monkeypatch, tiny_model, skeleton, weights
):
    """The command for GPUs, and what it says to add on CPUs."""
    page = (Path(__file__).parents[2] / "docs" / "sync.md").read_text("utf-8")
    section = page.partition("### Servers that run already")[2]
    command, further = re.findall(r"```text\n(.*?)```", section, re.DOTALL)[:2]
    port = free_port()
    monkeypatch.setenv(KEY, "secret")
    script = f"{command.strip()} \\\n{further.strip()} --port {port} --host 127.0.0.1\n"
    script = script.replace("VLLM_API_KEY=...", "VLLM_API_KEY=secret VLLM_PLUGINS=")
    script = script.replace("MODEL ", f"{skeleton} ").replace(
        "python -m", f"exec {sys.executable} -m"
    )
    server = ServerProcess(["bash", "-c", script], {})
    options = {"api_key_env": KEY, "dtype": "float32", "start_timeout_s": 200, "health_every_s": 1}
    visitor, another = (VLLMServer(urls=[f"http://127.0.0.1:{port}"], **options) for _ in range(2))
    try:
        visitor.start(skeleton)
        visitor.load_weights(weights.items(), 1)
        assert gap(visitor.replicas[0], plain_model(tiny_model, weights)) < ROUNDING
        with pytest.raises(ReplicaError, match="is used by another training run"):
            another.start(skeleton)
    finally:
        visitor.close()
        server.kill()


@pytest.mark.slow
def test_a_replica_that_dies_in_the_middle_of_a_push(tiny_model, lora_policy, engine, fault):
    """The other one is served, and itself comes back with the base and that push's adapters."""
    doomed, other = engine.replicas
    life = doomed.life

    class Murderous(CollectiveTransport):
        def transmit(self, bucket, replica):
            if doomed.version == 6 and replica is doomed:
                doomed._process.kill()
            super().transmit(bucket, replica)

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
