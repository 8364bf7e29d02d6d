"""Test every transport to replicas that are threads, with the real receivers: what arrives."""

import pytest
import torch

from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.push import Push
from lightning_rl.engines.replicas.replica import ReplicaLost
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import (
    ConfigError,
    EngineError,
    IncompleteWeightsError,
    WeightSyncError,
)
from lightning_rl.models.policy import Policy
from lightning_rl.run.digest import digest
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync import staged
from lightning_rl.sync.base import push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.group import BroadcastGroup
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights
from tests.support.engine_checks import wait_for
from tests.support.thread_replicas import halved, holds, lose

pytestmark = pytest.mark.timeout(60)
ONE = Sampling(max_tokens=1)


def test_a_push_reaches_every_replica(connect, engine, weights):
    transport = connect()
    for version, state in enumerate([weights, halved(weights)], 4):
        transport.push(state.items(), version)
        assert engine.version == version
        for replica in engine.replicas:
            assert holds(replica, state)
            assert (replica.version, replica.said) == (version, str(version))


def test_a_shared_group_sends_a_bucket_once(monkeypatch, engine, weights):
    """However many receive it; and it is made anew when one of them was."""
    sent = []
    broadcast = BroadcastGroup.broadcast

    def counted(group, tensor):
        if group.rank == 0:
            sent.append(group.size)
        return broadcast(group, tensor)

    monkeypatch.setattr(BroadcastGroup, "broadcast", counted)
    transport = CollectiveTransport(bucket_mb=0.05, timeout_s=10)
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
    assert sent.count(2) == 2 * buckets  # to the one that is left, and to the one that came back
    sent.clear()
    transport.push(halved(weights).items(), 3)
    assert sent == [3] * buckets
    assert all(holds(replica, halved(weights)) for replica in engine.replicas)
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
    with pytest.raises(IncompleteWeightsError, match=r"lacks 1 .*'model\.norm\.weight'"):
        transport.push([(n, w) for n, w in weights.items() if n != "model.norm.weight"], 2)
    transport.close()


def test_a_transport_in_the_script_that_runs_is_refused(tmp_path, engine, own_transport):
    class Own(own_transport):
        """A class as if it stood in the script."""

        __module__ = "__main__"
        fetch = staticmethod(own_transport.fetch)

    with pytest.raises(
        ConfigError, match=r"the engine's processes need to import Own, .* move it to a module"
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


def test_with_nccl_copies_are_on_the_host_and_two_buckets_on_the_device(engine, weights):
    transport = CollectiveTransport(bucket_mb=0.05, timeout_s=10)
    transport._copies_to_host = True  # as with NCCL
    transport._copies = read = Noted()
    transport.connect(engine)
    transport.push(weights.items(), 0)
    name = "model.layers.1.mlp.up_proj.weight"
    state = weights | {name: weights[name] + 1}
    transport.push(state.items(), 1)
    assert read.slots == []
    transport.push(Push(((n, w) for n, w in state.items() if n != name), kept={name}), 1)
    assert len(read.slots) == 1  # that of the weight which is left out
    assert len(transport._copies) > 2
    doomed = engine.replicas[0]
    run_async(lose(engine, doomed))  # what fills it goes through the two, too
    wait_for(lambda: doomed.version == 1 and doomed.life == 2)
    assert all(holds(replica, state) for replica in engine.replicas)
    assert sorted(transport._buffers) == [0, 1]
    transport.close()
    assert not transport._copies


@pytest.mark.parametrize("connect", ["memory"], indirect=True)
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


def test_what_a_transport_keeps_is_planned(engine):
    """7 billion weights in bfloat16 are 14 GB; nothing is kept for an engine in this process."""
    many, here = 7 * 10**9, TransformersEngine(device="cpu")
    engine.dtype = "bfloat16"
    assert MemoryTransport().kept_bytes(engine, many) == 14 * 10**9
    assert MemoryTransport(keep_copy=False).kept_bytes(engine, many) == 0
    assert MemoryTransport().kept_bytes(here, many) == 0
    assert CheckpointTransport("x").kept_bytes(engine, many) == 0


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
    with pytest.raises(ReplicaLost, match=r"no replica has got version 2.* keeps no copy"):
        transport.push(weights.items(), 2)
    transport.close()


def test_weights_left_out_leave_no_engine_to_generate_with(connect, engine, weights):
    transport = connect()
    transport.push(weights.items(), 0)
    with pytest.raises(IncompleteWeightsError, match=r"lacks 1 .*'model\.norm\.weight'"):
        transport.push([(n, w) for n, w in weights.items() if n != "model.norm.weight"], 1)
    with pytest.raises(EngineError, match="no trained weights"):
        run_async(engine.generate([3], ONE, 0))
    transport.push(weights.items(), 2)
    assert run_async(engine.generate([3], ONE, 0)).versions == [2]


@pytest.mark.parametrize(
    ("transport", "fix"),
    [
        (MemoryTransport(), "use CollectiveTransport"),
        (CollectiveTransport(), "set host to this machine's address"),
    ],
    ids=["memory", "collective"],
)
def test_another_machine_is_not_reached_by_this_ones_memory_or_loopback(engine, transport, fix):
    engine.replicas[1].host = "192.0.2.7"  # an address that no machine has (RFC 5737)
    with pytest.raises(ConfigError, match=f"replica 1 on another machine; {fix}"):
        transport.connect(engine)


def test_a_server_at_an_address_of_this_machine_reaches_its_loopback(engine):
    engine.replicas[1].host = "127.0.0.2"
    CollectiveTransport().connect(engine)


# The transport itself would wait for 300 s; see the time limit of this file.
def test_a_refusal_is_heard_while_the_others_still_wait(engine, weights):
    transport = CollectiveTransport()
    transport.connect(engine)
    engine.replicas[1].refuses = "init_weight_transfer_engine"
    with pytest.raises(WeightSyncError, match="replica 1 refuses"):
        transport.push(weights.items(), 0)
    transport.close()


def test_an_engine_with_another_version_refuses_before_it_is_met(monkeypatch, connect, engine):
    transport = connect()
    monkeypatch.setattr(transport, "shared_packages", ("numpy",))
    monkeypatch.setattr(staged, "minor_version", lambda package: "0.1")
    refused = r"the trainer has numpy 0\.1 and the engine \d+\.\d+, .*install the same version"
    with pytest.raises(WeightSyncError, match=refused):
        transport.push([], 0)
