"""Provide an engine whose replicas are threads, and every transport to it."""

import pytest

from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.thread_replicas import ThreadEngine


@pytest.fixture
def engine(request, tiny_model):
    """Yield two replicas, or as many as a test's parameter says."""
    engine = ThreadEngine(getattr(request, "param", 2))
    engine.start(tiny_model)
    yield engine
    engine.close()


TRANSPORTS = {
    "memory": lambda tmp, **o: MemoryTransport(bucket_mb=0.05, **o),
    "collective": lambda tmp, **o: CollectiveTransport(bucket_mb=0.05, timeout_s=10, **o),
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
