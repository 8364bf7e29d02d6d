"""Test one LoRA policy whose engine keeps base and adapters apart, in servers and in Ray.

It takes minutes: three servers and an actor start, and one of them anew.

Slow: these servers and actors are started with adapters, so they cannot be shared.
"""

import pytest

from lightning_rl.engines import RayEngine, VLLMServer
from lightning_rl.engines.replicas.server_access import CLAIM
from lightning_rl.errors import EngineError
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import connected, plain_model, train_adapters, wait_for
from tests.support.lora_apart import RANK_STABLE, SMALL, check, told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def policy(tiny_model):
    return Policy(str(tiny_model), lora=RANK_STABLE)


@pytest.fixture(scope="module")
def servers(skeleton):
    engine = told(VLLMServer(replicas=2, **SMALL), RANK_STABLE)
    engine.start(skeleton)
    yield engine
    engine.close()


TRANSPORTS = {
    "memory": lambda tmp: MemoryTransport(),
    "memory_two_buckets": lambda tmp: MemoryTransport(bucket_mb=0.05, keep_copy=False),
    "checkpoint": lambda tmp: CheckpointTransport(str(tmp)),
    "collective": lambda tmp: CollectiveTransport(bucket_mb=0.05, adapters_only=True),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_servers_keep_them_apart_by_every_transport(tiny_model, tmp_path, servers, policy, name):
    with connected(TRANSPORTS[name](tmp_path), servers) as transport:
        for version in (0, 1, 2):
            plain = plain_model(tiny_model, train_adapters(policy, seed=version))
            weights = list(transport.weights_of(policy))
            alone = all(".lora_" in name for name, _ in weights)
            assert alone == (version > 0 and name != "memory_two_buckets")
            transport.push(weights, version)
            for replica in servers.replicas:
                check(plain, replica, version)


def test_a_server_that_was_restarted_gets_base_and_adapters(tiny_model, servers, policy):
    with connected(MemoryTransport(), servers) as transport:
        for version in (0, 1):
            plain = plain_model(tiny_model, train_adapters(policy, seed=version))
            transport.push(transport.weights_of(policy), version)
        doomed = servers.replicas[0]
        doomed._process.kill()
        wait_for(lambda: doomed.life == 2 and doomed.version == 1)
        check(plain, doomed, 1)


def test_servers_that_run_already_need_room_for_adapters(skeleton, tiny_model, servers, policy):
    """Servers with room serve one run after the other; others say in the error what is missing."""
    there = [replica.name for replica in servers.replicas[:1]]
    key = servers.replicas[0]._headers["Authorization"].removeprefix("Bearer ")
    run_async(servers.replicas[0]._call("DELETE", CLAIM))  # as the run before does at its end
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUR_KEY", key)
        again = told(VLLMServer(there, api_key_env="OUR_KEY", adapters="apart"), RANK_STABLE)
        again.start(skeleton)
        with connected(MemoryTransport(), again) as transport:
            plain = plain_model(tiny_model, train_adapters(policy, seed=9))
            transport.push(transport.weights_of(policy), 9)
            check(plain, again, 9)
        again.close()
        run_async(servers.replicas[0]._claim())
        bare = VLLMServer(**SMALL | {"adapters": "merged"})
        bare.start(skeleton)
        patch.setenv("OUR_KEY", bare.replicas[0]._headers["Authorization"][7:])
        run_async(bare.replicas[0]._call("DELETE", CLAIM))
        wanting = VLLMServer([bare.replicas[0].name], api_key_env="OUR_KEY", adapters="apart")
        with pytest.raises(EngineError, match="--enable-lora --max-lora-rank"):
            told(wanting, RANK_STABLE).start(skeleton)
        bare.close()


def test_ray_actors_keep_them_apart(tiny_model, skeleton, policy):
    engine = told(RayEngine("local", replicas=1, bundle={"CPU": 1.0}, **SMALL), RANK_STABLE)
    engine.start(skeleton)
    with connected(MemoryTransport(), engine) as transport:
        for version in (0, 1):
            plain = plain_model(tiny_model, train_adapters(policy, seed=version))
            transport.push(transport.weights_of(policy), version)
            check(plain, engine.replicas[0], version)
    engine.close()
