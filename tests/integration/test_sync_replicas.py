"""Transports and replicas without vLLM: the real receivers, in replicas that are threads."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import torch

from lightning_rl.engines import http_replica, server_process
from lightning_rl.engines.base import ReplicaStatus, RunState
from lightning_rl.engines.http_replica import ServerRefusal, completion_of, refusal
from lightning_rl.engines.replica import ReplicaLost
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.server_process import (
    ListeningServer,
    ServerProcess,
    free_port,
    validation_failure,
)
from lightning_rl.engines.transformers import TransformersEngine
from lightning_rl.engines.vllm_server import VLLMServer, own_cores, server_command
from lightning_rl.errors import (
    ConfigError,
    DamagedWeightsError,
    EngineError,
    IncompleteWeightsError,
    ReplicaError,
    SyncTimeoutError,
    WeightSyncError,
)
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.run.digest import digest
from lightning_rl.run.loop import run_async
from lightning_rl.sync.base import push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import BroadcastGroup, CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights
from lightning_rl.sync.shared import SharedCollectiveTransport
from tests.support.engine_checks import train_adapters, wait_for
from tests.support.thread_replicas import ThreadEngine, halved, holds

pytestmark = pytest.mark.timeout(60)
ONE = Sampling(max_tokens=1)


@pytest.fixture
def engine(tiny_model):
    engine = ThreadEngine()
    engine.start(tiny_model)
    yield engine
    engine.close()


TRANSPORTS = {
    "memory": lambda tmp, **o: MemoryTransport(bucket_mb=0.05, **o),
    "collective": lambda tmp, **o: CollectiveTransport(bucket_mb=0.05, timeout_s=10, **o),
    "shared": lambda tmp, **o: SharedCollectiveTransport(bucket_mb=0.05, timeout_s=10, **o),
    "checkpoint": lambda tmp, **o: CheckpointTransport(str(tmp), **o),
}


@pytest.fixture(params=list(TRANSPORTS))
def connect(request, tmp_path, engine):
    made = []

    def make(**options):
        transport = TRANSPORTS[request.param](tmp_path, **options)
        transport.connect(engine)
        made.append(transport)
        return transport

    yield make
    for transport in made:
        transport.close()


def test_a_push_reaches_every_replica(connect, engine, weights):
    transport = connect()
    for version, state in enumerate([weights, halved(weights)], 4):
        transport.push(state.items(), version)
        assert engine.version == version
        for replica in engine.replicas:
            assert holds(replica, state)
            assert (replica.version, replica.said) == (version, str(version))


def test_only_what_changed_is_loaded(connect, engine, weights):
    transport = connect(changed_only=True)
    transport.push(weights.items(), 0)
    transport.push(weights.items(), 1)
    assert [replica.buckets for replica in engine.replicas] == [[], []]
    assert engine.version == 1
    name = "model.layers.1.mlp.up_proj.weight"
    changed = weights | {name: weights[name] + 1}
    transport.push(changed.items(), 2)
    for replica in engine.replicas:
        assert holds(replica, changed)
        (bucket,) = replica.buckets  # what is fused with it comes along
        assert bucket == [f"model.layers.1.mlp.{x}_proj.weight" for x in ("down", "gate", "up")]


def test_a_replica_that_dies_in_a_push_gets_it_later(connect, engine, weights):
    transport = connect()
    transport.push(weights.items(), 0)
    doomed, other = engine.replicas
    doomed.dies_at = "update_weights"
    state = halved(weights)
    transport.push(state.items(), 1)
    assert holds(other, state)
    wait_for(lambda: doomed.version == 1)
    assert doomed.life == 2
    assert holds(doomed, state)


def test_the_group_of_a_replica_that_dies_is_left_at_once(engine, weights):
    """A broadcast that waits for it would keep a GPU busy for as long as it is not aborted."""
    transport = CollectiveTransport(bucket_mb=0.05, timeout_s=10)
    transport.connect(engine)
    transport.push(weights.items(), 0)
    doomed, other = engine.replicas
    group = transport._groups[doomed]
    doomed.dies_at, doomed.starts = "update_weights", False
    transport.push(halved(weights).items(), 1)
    assert list(transport._groups) == [other]
    doomed.receiver.close()  # as its process does when it ends
    wait_for(lambda: group._group is None)
    # One that refuses ends the push, and no group is left in the middle of something.
    with pytest.raises(IncompleteWeightsError):
        transport.push(list(weights.items())[1:], 2)
    assert transport._groups == {}
    transport.push(weights.items(), 3)
    assert holds(other, weights)
    transport.close()


def test_a_shared_group_sends_a_bucket_once(monkeypatch, engine, weights):
    """However many receive it; and it is made anew when one of them was."""
    sent = []
    broadcast = BroadcastGroup.broadcast

    def counted(group, tensor):
        if group.rank == 0:
            sent.append(group.size)
        return broadcast(group, tensor)

    monkeypatch.setattr(BroadcastGroup, "broadcast", counted)
    transport = SharedCollectiveTransport(bucket_mb=0.05, timeout_s=10)
    transport.connect(engine)
    transport.push(weights.items(), 0)
    buckets = len(engine.replicas[0].buckets)
    assert sent == [3] * buckets
    group = transport._group
    transport.push(halved(weights).items(), 1)
    assert sent == [3] * 2 * buckets
    assert transport._group is group
    doomed = engine.replicas[0]
    doomed.dies_at = "update_weights"
    sent.clear()
    transport.push(weights.items(), 2)
    wait_for(lambda: doomed.version == 2)
    assert sent.count(2) == 2 * buckets  # by itself, the one that is left; and whoever came back
    assert transport._group is None
    sent.clear()
    transport.push(halved(weights).items(), 3)
    assert sent == [3] * buckets
    assert all(holds(replica, halved(weights)) for replica in engine.replicas)
    transport.close()


@pytest.mark.parametrize("lost", [1, 2])
def test_servers_that_are_cut_off_in_a_push_are_waited_for(connect, engine, weights, lost):
    """They are not ours to start anew, so they come back as the processes that they were."""
    transport = connect()
    transport.push(weights.items(), 0)
    state = halved(weights)
    cut = engine.replicas[:lost]
    for replica in cut:
        replica.can_restart, replica.cut_off = False, True
    transport.push(state.items(), 1)
    assert engine.version == 1
    assert [replica.alive for replica in engine.replicas] == [False] * lost + [True] * (2 - lost)

    async def generate_meanwhile():
        waiting = asyncio.create_task(engine.generate([3], ONE, 0))
        await asyncio.sleep(0.05)
        assert waiting.done() == (lost == 1)  # the other one, or nobody
        for replica in cut:
            replica.cut_off = False
        return await waiting

    assert run_async(generate_meanwhile()).versions == [1]
    wait_for(lambda: all(replica.version == 1 for replica in engine.replicas))
    assert all(holds(replica, state) for replica in engine.replicas)
    assert not any(replica.paused for replica in engine.replicas)


def test_a_server_that_is_cut_off_while_it_is_paused_is_waited_for(engine, weights):
    engine.load_weights(weights.items(), 0)
    replica, other = engine.replicas
    transport = MemoryTransport()
    transport.connect(engine)
    pause = replica.pause

    async def too_late():
        replica.pause = pause
        raise SyncTimeoutError(f"{replica.name}/pause did not answer within 60 s")

    replica.pause = too_late
    transport.push(halved(weights).items(), 1)
    assert other.version == 1
    wait_for(lambda: replica.version == 1)
    transport.close()


def test_equal_losses_of_a_replica_are_told_once_and_then_counted(engine, weights, caplog):
    transport = MemoryTransport()
    transport.connect(engine)
    transport.push(weights.items(), 0)
    doomed = engine.replicas[0]
    doomed.starts = False

    async def lose_often():
        for _ in range(292):
            engine.lost(doomed, ReplicaLost("replica 0: connection refused"))
        engine.lost(doomed, ReplicaLost("replica 0: no route to host"))

    run_async(lose_often())
    told = [r.getMessage() for r in caplog.records if "connection refused" in r.getMessage()]
    assert told == [
        "lost a replica of the engine: replica 0: connection refused",
        "lost a replica of the engine, 10 times by now: replica 0: connection refused",
        "lost a replica of the engine, 100 times by now: replica 0: connection refused",
    ]
    assert "lost a replica of the engine: replica 0: no route to host" in caplog.text
    doomed.starts = True
    wait_for(lambda: doomed.version == 0)
    assert "replica 0 is back (failures meanwhile: 29" in caplog.text
    run_async(lose(engine, doomed))  # another time, which is told again
    assert caplog.text.count("lost a replica of the engine: injected") == 1
    transport.close()


def test_a_transport_of_ones_own_fills_replicas_too(tmp_path, engine, weights, own_transport):
    transport = own_transport(str(tmp_path))
    transport.connect(engine)
    transport.push(weights.items(), 0)
    assert all(holds(replica, weights) for replica in engine.replicas)
    doomed, other = engine.replicas
    doomed.dies_at = "update_weights"
    state = halved(weights)
    transport.push(state.items(), 1)
    assert holds(other, state)
    wait_for(lambda: doomed.version == 1)
    assert holds(doomed, state)
    with pytest.raises(IncompleteWeightsError, match=r"left out 1 .*'model\.norm\.weight'"):
        transport.push([(n, w) for n, w in weights.items() if n != "model.norm.weight"], 2)
    transport.close()


def test_a_transport_of_ones_own_sends_adapters_alone(tmp_path, engine, lora_policy, own_transport):
    transport = own_transport(str(tmp_path))
    transport.adapters_only = True  # as its constructor may tell that of StagedTransport
    transport.connect(engine)
    for version, seed in enumerate((1, 2)):
        merged = train_adapters(lora_policy, seed)
        transport.push(transport.weights_of(lora_policy), version)
        assert all(holds(replica, merged) for replica in engine.replicas)
    run_async(lose(engine, engine.replicas[0]))
    wait_for(lambda: engine.replicas[0].version == 1 and engine.replicas[0].life == 2)
    assert holds(engine.replicas[0], merged)
    transport.close()


def test_a_transport_in_the_script_that_runs_is_refused(tmp_path, engine, own_transport):
    class Own(own_transport):
        """As if it stood in the script."""

        __module__ = "__main__"
        fetch = staticmethod(own_transport.fetch)

    with pytest.raises(
        ConfigError, match=r"Own takes weights in .* move it to a module of its own"
    ):
        Own(str(tmp_path)).connect(engine)
    Own(str(tmp_path)).connect(TransformersEngine(device="cpu"))  # which is in this process


class Noted(dict):
    """Copies on the host, and which of them were brought back to the device."""

    def __init__(self):
        super().__init__()
        self.slots = []

    def __getitem__(self, slot):
        self.slots.append(slot)
        return super().__getitem__(slot)


@pytest.mark.parametrize("changed_only", [False, True])
def test_with_nccl_copies_are_on_the_host_and_two_buckets_on_the_device(
    engine, weights, changed_only
):
    transport = CollectiveTransport(bucket_mb=0.05, timeout_s=10, changed_only=changed_only)
    transport._copies_to_host = True  # as with NCCL
    transport._copies = read = Noted()
    transport.connect(engine)
    transport.push(weights.items(), 0)
    name = "model.layers.1.mlp.up_proj.weight"
    state = weights | {name: weights[name] + 1}
    transport.push(state.items(), 1)
    assert read.slots == (list(read) if changed_only else [])
    assert all(len(replica.buckets) == 1 for replica in engine.replicas) == changed_only
    transport.push(((n, w.to("meta") if n == name else w) for n, w in state.items()), 1)
    assert changed_only or len(read.slots) == 1  # that of the weight which is left out
    assert len(transport._copies) > 2
    doomed = engine.replicas[0]
    run_async(lose(engine, doomed))  # what fills it goes through the two, too
    wait_for(lambda: doomed.version == 1 and doomed.life == 2)
    assert all(holds(replica, state) for replica in engine.replicas)
    assert sorted(transport._buffers) == [0, 1]
    transport.close()
    assert not transport._copies


def test_with_changes_only_a_restarted_replica_gets_everything(connect, engine, weights):
    transport = connect(changed_only=True)
    transport.push(weights.items(), 0)
    engine.refill = None  # so that it is empty when the next push comes
    run_async(lose(engine, engine.replicas[0]))
    wait_for(lambda: engine.replicas[0].life == 2)
    transport.push(weights.items(), 1)
    assert holds(engine.replicas[0], weights)


def test_what_each_replica_is_doing(connect, engine, weights):
    def states():
        return [replica.state for replica in engine.replica_states()]

    assert states() == [RunState.WAITING] * 2  # for the first push
    transport = connect()
    transport.push(weights.items(), 0)
    assert states() == [RunState.RUNNING] * 2
    run_async(engine.pause())
    assert states() == [RunState.WAITING] * 2
    run_async(engine.resume())
    engine.refill = None
    engine.replicas[0].starts = False
    run_async(lose(engine, engine.replicas[0]))
    assert states() == [RunState.STOPPED, RunState.RUNNING]
    engine.replicas[0].starts = True
    wait_for(lambda: engine.replicas[0].alive)
    assert states() == [RunState.WAITING, RunState.RUNNING]  # it is back, but empty
    transport.push(weights.items(), 1)
    assert engine.replica_states() == [
        ReplicaStatus(f"replica {i}", RunState.RUNNING, version=1, in_flight=0) for i in range(2)
    ]


# -------------------------------------------------------------------- adapters


@pytest.fixture
def lora_policy(tiny_model):
    return Policy(
        str(tiny_model), lora=LoRA(rank=2, alpha=4.0, target_modules=["q_proj", "up_proj"])
    )


def test_adapters_alone_make_the_merged_weights(connect, engine, lora_policy):
    """To the bit, for the scale of 4 / 2 is exact."""
    transport = connect(adapters_only=True)
    # Float32 A of (2, 64) and B of (64, 2), of q and up in each of two layers.
    adapters = 4 * 2 * 2 * (2 * 64 + 64 * 2)
    for version, seed in enumerate((1, 2, 3)):
        merged = train_adapters(lora_policy, seed)
        transport.push(transport.weights_of(lora_policy), version)
        for replica in engine.replicas:
            assert holds(replica, merged)
            assert (replica.version, replica.said) == (version, str(version))
            if version > 0:
                assert replica.received == adapters
                loaded = {name for bucket in replica.buckets for name in bucket}
                assert loaded == {  # what an engine fuses with an adapted layer comes with it
                    n for n in merged if ".self_attn." in n or ".mlp." in n
                }


def test_a_restarted_replica_serves_once_it_holds_what_was_sent(connect, engine, tiny_model):
    transport, sent = connect(), SentWeights()
    policy = Policy(str(tiny_model))
    assert push(transport, engine, policy, 0, sent) == 2 * len(dict(policy.named_weights()))
    doomed = engine.replicas[0]
    name, right = next(iter(sent.digests.items()))
    sent.digests[name] = digest(torch.zeros(3))  # so what it is filled with is not that
    run_async(lose(engine, doomed))
    wait_for(lambda: doomed.life == 3)  # filled, refused and started anew
    before = doomed.generated
    for seed in range(4):
        run_async(engine.generate([3], ONE, seed))
    assert doomed.generated == before
    sent.digests[name] = right
    wait_for(lambda: doomed.version == 0)
    assert holds(doomed, dict(policy.named_weights()))


def test_a_restarted_replica_gets_base_and_adapters(connect, engine, lora_policy):
    transport = connect(adapters_only=True)
    for version, seed in enumerate((1, 2)):
        merged = train_adapters(lora_policy, seed)
        transport.push(transport.weights_of(lora_policy), version)
    doomed, other = engine.replicas
    run_async(lose(engine, doomed))
    wait_for(lambda: doomed.version == 1)
    assert doomed.life == 2
    assert holds(doomed, merged)
    # And one that dies in a push, or lost what refills it: the base comes again, from its copy.
    merged = train_adapters(lora_policy, 3)
    doomed.dies_at = "update_weights"
    transport.push(transport.weights_of(lora_policy), 2)
    assert holds(other, merged)
    wait_for(lambda: doomed.version == 2)
    assert holds(doomed, merged)
    engine.refill = None
    run_async(lose(engine, doomed))
    wait_for(lambda: doomed.life == 4 and doomed.alive)
    merged = train_adapters(lora_policy, 4)
    transport.push(transport.weights_of(lora_policy), 3)
    assert holds(doomed, merged)
    assert holds(other, merged)


@pytest.mark.parametrize("changed_only", [False, True])
def test_frozen_weights_go_to_each_replica_once(connect, engine, tiny_model, changed_only):
    transport, sent, policy = connect(changed_only=changed_only), SentWeights(), Policy(tiny_model)
    policy.lm.model.layers[0].requires_grad_(False)

    def trained(version):
        """What each replica loads of the next version; it holds all of it."""
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01)
        push(transport, engine, policy, version, sent)
        weights = dict(policy.named_weights())
        assert all(holds(r, weights) for r in engine.replicas if r.version == version)
        return [{n for bucket in r.buckets for n in bucket} for r in engine.replicas]

    everything = set(dict(policy.named_weights()))
    moving = {name for name in everything if not name.startswith("model.layers.0.")}
    once = changed_only or not isinstance(transport, CheckpointTransport)
    assert trained(0) == [everything] * 2
    assert trained(1) == [moving if once else everything] * 2
    # One that comes back has all of it, and so has one that dies in a push.
    doomed = engine.replicas[0]
    run_async(lose(engine, doomed))
    wait_for(lambda: doomed.version == 1)
    assert holds(doomed, dict(policy.named_weights()))
    assert trained(2) == [moving if once else everything] * 2
    doomed.dies_at = "update_weights"
    trained(3)
    wait_for(lambda: doomed.version == 3)
    assert holds(doomed, dict(policy.named_weights()))
    # One that was not filled in time gets all in a push that leaves out what the copy has.
    engine.refill = None
    run_async(lose(engine, doomed))
    wait_for(lambda: doomed.life == 4 and doomed.alive)
    assert trained(4) == [everything] * 2
    assert trained(5) == [moving if once else everything] * 2


def test_an_adapter_that_is_left_out_is_named(connect, engine, lora_policy):
    transport = connect(adapters_only=True)
    transport.push(transport.weights_of(lora_policy), 0)
    lost = "model.layers.1.self_attn.q_proj.lora_"
    for left_out, message in (
        (lost, f"left 2 adapters as they were, first '{lost}A"),
        (f"{lost}A", f"left out '{lost}A', the other half of an adapter"),
    ):
        weights = [w for w in transport.weights_of(lora_policy) if not w[0].startswith(left_out)]
        with pytest.raises(IncompleteWeightsError, match=message):
            transport.push(weights, 1)
    assert engine.version == -1
    merged = train_adapters(lora_policy, 5)
    transport.push(transport.weights_of(lora_policy), 2)  # with the base, for who knows
    assert all(holds(replica, merged) for replica in engine.replicas)


def test_what_a_transport_keeps_is_planned(engine):
    """7 billion weights in bfloat16 are 14 GB; nothing is kept for an engine in this process."""
    many, here = 7 * 10**9, TransformersEngine(device="cpu")
    engine.dtype = "bfloat16"
    assert MemoryTransport().kept_bytes(engine, many) == 14 * 10**9
    assert MemoryTransport(keep_copy=False).kept_bytes(engine, many) == 0
    assert MemoryTransport().kept_bytes(here, many) == 0
    assert CheckpointTransport("x").kept_bytes(engine, many) == 0


async def lose(engine, replica):
    engine.lost(replica, ReplicaLost("injected"))


@pytest.mark.parametrize("kind", [MemoryTransport, CollectiveTransport])
def test_without_a_copy_a_restarted_replica_waits_for_the_next_push(engine, weights, kind):
    transport = kind(bucket_mb=0.05, keep_copy=False, timeout_s=10)
    transport.connect(engine)
    transport.push(weights.items(), 0)
    assert holds(engine.replicas[0], weights)  # two buffers were enough
    run_async(lose(engine, engine.replicas[0]))
    wait_for(lambda: engine.replicas[0].life == 2 and engine.replicas[0].alive)
    before = engine.replicas[0].generated
    for seed in range(4):
        run_async(engine.generate([3], ONE, seed))
    assert engine.replicas[0].generated == before
    transport.push(weights.items(), 1)
    assert holds(engine.replicas[0], weights)
    for replica in engine.replicas:
        replica.dies_at = "update_weights"
    with pytest.raises(ReplicaLost, match=r"no replica was left .* keeps no copy"):
        transport.push(weights.items(), 2)
    transport.close()


def test_weights_left_out_leave_no_engine_to_generate_with(connect, engine, weights):
    transport = connect()
    transport.push(weights.items(), 0)
    with pytest.raises(IncompleteWeightsError, match=r"left out 1 .*'model\.norm\.weight'"):
        transport.push([(n, w) for n, w in weights.items() if n != "model.norm.weight"], 1)
    with pytest.raises(EngineError, match="no trained weights"):
        run_async(engine.generate([3], ONE, 0))
    transport.push(weights.items(), 2)
    assert run_async(engine.generate([3], ONE, 0)).versions == [2]


def test_requests_of_a_dead_replica_go_to_another_once(engine, weights):
    engine.load_weights(weights.items(), 0)
    engine.replicas[0].dies_at = "generate"

    async def run():
        return await asyncio.gather(*(engine.generate([3], ONE, seed) for seed in range(8)))

    assert [c.token_ids for c in run_async(run())] == [[seed] for seed in range(8)]
    assert sum(replica.generated for replica in engine.replicas) == 8 + 1


def test_all_replicas_gone_is_an_error_in_time(engine, weights):
    engine.load_weights(weights.items(), 0)
    engine.recovery_timeout_s = 0.2
    for replica in engine.replicas:
        replica.starts = False
        run_async(lose(engine, replica))
    with pytest.raises(ReplicaError, match=r"none of 2 replicas came back .*=0\.2: replica 0"):
        run_async(engine.generate([3], ONE, 0))


def test_a_request_that_kills_whoever_takes_it_does_not_go_round_for_ever(engine, weights):
    transport = MemoryTransport()
    transport.connect(engine)
    transport.push(weights.items(), 0)

    async def poison(*_):
        raise ReplicaLost("poisoned")

    for replica in engine.replicas:
        replica.generate = poison
    with pytest.raises(EngineError, match=r"lost 4 replicas .*poisoned"):
        run_async(engine.generate([3], ONE, 0))
    transport.close()


# -------------------------------------------------------------------- groups


def test_a_peer_that_never_comes_is_an_error_in_time():
    group = BroadcastGroup("127.0.0.1", 0, rank=0, size=2, backend="gloo", timeout_s=0.5)
    with pytest.raises(SyncTimeoutError, match=r"2 processes .* did not meet .* within 0\.5 s"):
        group.meet()


def pair(timeout_s):
    sender = BroadcastGroup("127.0.0.1", 0, rank=0, size=2, backend="gloo", timeout_s=timeout_s)
    receiver = BroadcastGroup("127.0.0.1", sender.port, 1, 2, "gloo", timeout_s)
    thread = threading.Thread(target=receiver.meet)
    thread.start()
    sender.meet()
    thread.join()
    return sender, receiver


def test_a_stuck_peer_is_an_error_in_time():
    sender, receiver = pair(timeout_s=0.5)
    big = torch.zeros(2**22)
    with pytest.raises(SyncTimeoutError, match=r"did not take part .* within 0\.5 s"):
        sender.wait(sender.broadcast(big))
    receiver.close()


def test_a_peer_that_leaves_is_noticed_at_once():
    sender, receiver = pair(timeout_s=50)
    work = sender.broadcast(torch.zeros(2**22))
    receiver.close()
    with pytest.raises(SyncTimeoutError, match="is gone"):
        sender.wait(work)


# -------------------------------------------------------------------- servers


def test_versions_come_from_spans():
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"logprob": -x} for x in (1.0, 2.0, 3.0)]},
        "finish_reason": "length",
        "weight_versions": [
            {"version": "4", "start": 0, "end": 2},
            {"version": "5", "start": 2, "end": 3},
        ],
    }
    assert completion_of(choice) == Completion([5, 6, 7], [-1, -2, -3], "length", [4, 4, 5])
    with pytest.raises(EngineError, match="3 tokens, 3 logprobs and weight versions None"):
        completion_of(choice | {"weight_versions": None})


def test_a_workers_error_keeps_its_class():
    text = (
        '{"error":{"message":"Call to collective_rpc method failed: Worker failed with error '
        "'DamagedWeightsError: x.safetensors cannot be read: no', please check the stack\"}}"
    )
    error = refusal("http://a", "/update_weights", 500, text)
    assert type(error) is DamagedWeightsError
    assert str(error) == "http://a: x.safetensors cannot be read: no"
    assert type(refusal("a", "/b", 500, "WeightSyncError: odd")) is WeightSyncError
    assert str(refusal("a", "/b", 404, "gone")) == "a/b answered 404: gone"
    # What a server answers between its engine's death and its own: another one may.
    dead = '{"error":{"message":"EngineCore encountered an issue. See stack trace (above)..."}}'
    assert type(refusal("a", "/b", 500, dead)) is ReplicaLost
    assert type(refusal("a", "/b", 500, "Internal Server Error")) is ServerRefusal


def test_servers_on_one_machine_have_cores_of_their_own(monkeypatch):
    """vLLM itself would bind each of them to the same."""
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(bind, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7, 9})
    assert own_cores(0, 2) == {bind: "4,6,9"}
    assert own_cores(1, 2) == {bind: "5,7"}
    assert own_cores(6, 7) == {bind: "5"}  # more servers than cores
    monkeypatch.setenv(bind, "0-3")  # the user's
    assert own_cores(0, 2) == {}


def test_a_command_for_a_server():
    command = server_command({"model": "m", "enforce_eager": True, "x_y": None, "a": {"b": 1}})
    assert command[command.index("--model") + 1] == "m"
    assert "--enforce-eager" in command
    assert "--x-y" not in command
    assert command[command.index("--a") + 1] == '{"b": 1}'
    assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "lightning_rl"}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, r"urls=\[\] are servers"),
        ({"urls": ["http://a"], "replicas": 2}, "leave out replicas"),
        ({"replicas": 0}, "replicas=0 must be >= 1"),
        ({"replicas": 2, "devices": ["0"]}, r"devices=\['0'\] must name one entry"),
        ({"dtype": "int8"}, "dtype='int8' must be"),
        ({"call_timeout_s": 0}, "call_timeout_s=0 must be"),
        ({"urls": ["localhost:8000"]}, r"'localhost:8000' is no http://host:port; write it like"),
        ({"urls": ["http://a:port"]}, "is no http://host:port"),
        ({"urls": ["http://a:80/v1"]}, "must end before /v1: 'http://a:80'"),
    ],
)
def test_impossible_servers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        VLLMServer(**options)


def test_a_server_that_does_not_start_says_why(tmp_path, tiny_model):
    engine = VLLMServer(urls=["http://127.0.0.1:9"], start_timeout_s=0.5)
    with pytest.raises(ReplicaError, match=r"127\.0\.0\.1:9 did not answer within .*=0\.5"):
        engine.start(tiny_model)
    assert not engine.running


@pytest.fixture
def stranger():
    """Answers every request with the status and body that a test puts into ``says``."""
    says = {"status": 200, "body": b"<html></html>"}

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(says["status"])
            self.send_header("Content-Length", str(len(says["body"])))
            self.end_headers()
            self.wfile.write(says["body"])

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", says
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html></html>", "is no vLLM server.*answered what no vLLM server would"),
        (404, b"", "is no vLLM server.*/health answered 404"),
        (401, b"", "wants another api_key_env.*/health answered 401"),
        (200, b'{"data": []}', r"is no vLLM server: its /v1/models does not tell"),
    ],
)
def test_a_server_that_is_no_vllm_is_told_at_once(stranger, tiny_model, status, body, message):
    url, says = stranger
    says.update(status=status, body=body)
    engine = VLLMServer(urls=[url], start_timeout_s=1e9)
    with pytest.raises(ReplicaError, match=message):
        engine.start(tiny_model)


def test_a_proxy_whose_server_still_loads_is_waited_for(stranger, tiny_model):
    url, says = stranger
    says.update(status=503, body=b"")
    engine = VLLMServer(urls=[url], start_timeout_s=0.5)
    with pytest.raises(ReplicaError, match=r"did not answer within .*/health answered 503"):
        engine.start(tiny_model)


def test_a_refused_port_is_told_again_and_again(tiny_model, caplog, monkeypatch):
    for name in ("_FIRST_NOTICE_S", "_NEXT_NOTICE_S"):
        monkeypatch.setattr(http_replica, name, 0.2)
    engine = VLLMServer(urls=["http://127.0.0.1:9"], start_timeout_s=1.5)
    with pytest.raises(ReplicaError, match=r"Connect call failed"):
        engine.start(tiny_model)
    told = [record for record in caplog.records if "no answer from" in record.getMessage()]
    assert len(told) > 1
    assert "http://127.0.0.1:9" in told[0].getMessage()


def test_a_missing_key_is_named(monkeypatch, tiny_model):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    engine = VLLMServer(urls=["http://127.0.0.1:9"], api_key_env="NO_SUCH_KEY")
    with pytest.raises(EngineError, match="api_key_env='NO_SUCH_KEY'"):
        engine.start(tiny_model)


def test_memory_does_not_reach_another_machine(engine):
    engine.replicas[1].host = "10.0.0.7"
    with pytest.raises(ConfigError, match="replica 1 on another machine; use CollectiveTransport"):
        MemoryTransport().connect(engine)


SLEEPS = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]


def group_of(leader) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, _, _, session = file.read().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == leader and state != "Z":
                found.append(int(entry))
    return found


def test_killing_a_server_leaves_nothing():
    server = ServerProcess(SLEEPS, {})
    leader = server._process.pid
    wait_for(lambda: len(group_of(leader)) == 3)  # keeper, python, sleep
    assert server.running
    server.kill()
    assert not server.running
    wait_for(lambda: not group_of(leader))


def test_a_server_does_not_outlive_us():
    # The file by itself, for importing the package takes seconds.
    program = f"""
        import runpy, time
        ServerProcess = runpy.run_path({server_process.__file__!r})["ServerProcess"]
        print(ServerProcess({SLEEPS!r}, {{}})._process.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    leader = int(parent.stdout.readline())
    wait_for(lambda: len(group_of(leader)) == 3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not group_of(leader))


def test_a_server_says_why_it_ended():
    server = ServerProcess([sys.executable, "-c", "print('x'); raise ValueError('bad port')"], {})
    wait_for(lambda: not server.running)
    assert server.tail() == "ValueError: bad port"


@pytest.mark.skipif(sys.platform != "linux", reason="a port can be held on Linux alone")
def test_nobody_else_gets_the_port_until_a_server_listens_on_it(monkeypatch):
    program = (
        "import sys; from http.server import HTTPServer, SimpleHTTPRequestHandler as Handler\n"
        "sys.stdin.read(); HTTPServer((sys.argv[2], int(sys.argv[4])), Handler).serve_forever()"
    )
    server = ListeningServer([sys.executable, "-c", program], {})
    place = urlsplit(server.url)
    monkeypatch.setattr(server_process, "_ASKED_FOR", range(place.port, place.port + 1))
    try:
        with pytest.raises(OSError, match=r"none of .* is free"):
            free_port(place.hostname)
        wait_for(lambda: answers(server.url))
    finally:
        server.kill()


def answers(url):
    try:
        with urllib.request.urlopen(url) as reply:
            return reply.status == 200
    except urllib.error.URLError:
        return False


def test_what_a_server_refuses_is_said_without_what_surrounds_it():
    """The lines that vLLM prints."""
    told = (
        "Traceback (most recent call last):\n  File x\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len (10) is too large. [type=value_error, input_value=Args()]\n"
        "    For further information visit https://errors.pydantic.dev/value_error"
    )
    assert validation_failure(told) == "max_model_len (10) is too large."
    told = told.replace("ModelConfig\n  Value error, max", "ModelConfig\ndtype\n  Max")
    assert validation_failure(told) == "dtype: Max_model_len (10) is too large."
    assert validation_failure("ValueError: 1 2 3") is None


def test_an_engine_core_that_fails_is_the_root_cause():
    program = "import sys; sys.stderr.write(sys.argv[1])"
    printed = (
        "(EngineCore pid=9) ERROR [core.py:1]     raise ValueError(\n"
        "ValueError: No memory for the cache.\n    raise RuntimeError(\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n"
        "UserWarning: leaked objects\n"
    )
    server = ServerProcess([sys.executable, "-c", program, printed], {})
    wait_for(lambda: not server.running)
    assert server.tail() == "ValueError: No memory for the cache."
