"""Provide real engines that are started once, for all tests that need no engine of their own.

Whoever takes one pushes weights first, and so finds it as after its start: a push drops what was
cached. That nothing is in flight is checked before an engine is lent, and after the last test.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.task import KeptEngine
from lightning_rl.engines import RayEngine, TransformersEngine, VLLMServer
from tests.support.engine_checks import is_running, processes_of, require_idle, wait_for

SIZES: dict[str, Any] = {"max_model_len": 128, "kv_cache_gb": 0.05}
NODE = {"num_cpus": 2, "object_store_memory": 100_000_000}


@pytest.fixture(scope="session")
def vllm_in(skeleton: Path) -> Iterator[Callable[..., KeptEngine]]:
    """Lend the vLLM of this process that has these settings; it holds no version yet."""
    engines: dict[str, KeptEngine] = {}

    def lend(dtype: str = "float32", **settings: Any) -> KeptEngine:
        name = str((dtype, sorted(settings.items())))
        if name not in engines:
            engines[name] = KeptEngine(dtype, **SIZES, **settings)
            engines[name].start(skeleton)
        require_idle(engines[name])
        engines[name].close()
        return engines[name]

    yield lend
    for engine in engines.values():
        require_idle(engine)
        engine.end()


@pytest.fixture(scope="module")
def vllm(vllm_in: Callable[..., KeptEngine]) -> KeptEngine:
    """Lend vLLM in this process, in float32."""
    return vllm_in()


@pytest.fixture(scope="session")
def servers(skeleton: Path, own_transport: type) -> Iterator[VLLMServer]:
    """Yield two vLLM servers, in float32; none of their processes is left when they close."""
    engine = VLLMServer(replicas=2, health_every_s=1.0, recovery_timeout_s=200, **SIZES)
    engine.start(skeleton)
    yield engine
    require_idle(engine)
    pids = [p for r in engine.replicas for p in processes_of(r._process._process.pid)]
    assert len(pids) >= 6  # for each: keeper, server, engine
    engine.close()
    wait_for(lambda: not [pid for pid in pids if is_running(pid)])


@pytest.fixture(scope="module")
def cluster(own_transport: type) -> Iterator[Any]:
    """Yield a Ray cluster of two nodes of two CPUs each, on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def actors(cluster: Any, skeleton: Path) -> Iterator[RayEngine]:
    """Yield two Ray actors, one per node, in float32; with them this process leaves the cluster."""
    import ray

    engine = RayEngine(
        cluster.address, health_every_s=1.0, recovery_timeout_s=300, start_timeout_s=300, **SIZES
    )
    engine.start(skeleton)
    yield engine
    require_idle(engine)
    engine.close()
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def transformers(skeleton: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(device="cpu")
    engine.start(skeleton)
    yield engine
    engine.close()
