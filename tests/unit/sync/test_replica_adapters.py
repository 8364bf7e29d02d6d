"""Test pushes of adapters alone, and without frozen weights, to replicas that are threads."""

import pytest
import torch

from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import IncompleteWeightsError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.base import push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.sent import SentWeights
from tests.support.engine_checks import train_adapters, wait_for
from tests.support.thread_replicas import holds, lose

pytestmark = pytest.mark.timeout(60)
ONE = Sampling(max_tokens=1)


@pytest.fixture
def lora_policy(tiny_model):
    return Policy(
        str(tiny_model), lora=LoRA(rank=2, alpha=4.0, target_modules=["q_proj", "up_proj"])
    )


@pytest.mark.parametrize("engine", [1, 2], indirect=True)
def test_adapters_alone_make_the_merged_weights(connect, engine, lora_policy):
    """The weights are equal to the bit, for the scale of 4 / 2 is exact."""
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
    # The base comes again, from its copy, to one that dies in a push, or lost what refills it.
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


def test_frozen_weights_go_to_each_replica_once(connect, engine, tiny_model):
    transport, sent, policy = connect(), SentWeights(), Policy(tiny_model)
    policy.lm.model.layers[0].requires_grad_(False)

    def trained(version):
        """Push the next version, check that replicas hold all of it, and return what each loads."""
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
    once = not isinstance(transport, CheckpointTransport)
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
        (lost, f"lacks 2 adapters, the first is '{lost}A"),
        (f"{lost}A", f"lacks '{lost}A', the other half of an adapter"),
    ):
        weights = [w for w in transport.weights_of(lora_policy) if not w[0].startswith(left_out)]
        with pytest.raises(IncompleteWeightsError, match=message):
            transport.push(weights, 1)
    assert engine.version == -1
    merged = train_adapters(lora_policy, 5)
    transport.push(transport.weights_of(lora_policy), 2)  # with the base, for who knows
    assert all(holds(replica, merged) for replica in engine.replicas)
