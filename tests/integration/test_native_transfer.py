"""Test vLLM's own weight transfers, with its code on both ends and a queue in place of NCCL."""

import queue
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor

from lightning_rl import MemoryTransport
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.engines.replicas.server import VLLMServer, server_command
from lightning_rl.errors import (
    ConfigError,
    IncompleteWeightsError,
    SyncTimeoutError,
    WeightSyncError,
)
from lightning_rl.extend import IPCTransport, NCCLTransport

BUCKET_MB = 0.02


class Wire:
    """Stands for a communicator: what one end broadcasts, each of the others takes."""

    def __init__(self, ends):
        self.ends = [queue.Queue() for _ in range(ends)]
        self.destroyed = False

    def broadcast(self, tensor, src):
        for end in self.ends:
            end.put(tensor.clone())

    def destroy(self):
        self.destroyed = True


class End:
    def __init__(self, pipe):
        self.pipe = pipe

    def broadcast(self, tensor, src):
        tensor.copy_(self.pipe.get(timeout=1))


class Recorder(Replica):
    """Notes what it is told; loads NCCL's weights with vLLM's own consumer."""

    can_restart = True

    def __init__(self, name, world, workers=1):
        super().__init__(name, "127.0.0.1")
        self.world, self.workers = world, workers
        self.told, self.held, self.fails_at = [], {}, {}
        self.life = 1
        self.gone.clear()

    async def start(self): ...
    async def answers(self): ...
    async def generate(self, token_ids, sampling, seed): ...
    async def pause(self): ...
    async def resume(self): ...
    async def close(self): ...

    async def transfer(self, step, timeout_s, **arguments):
        self.told.append((step, arguments))
        if step in self.fails_at:
            raise self.fails_at[step]
        if step == "update_weights" and (wire := self.world.get("wire")) is not None:
            import asyncio

            await asyncio.to_thread(self.receive, wire, arguments["update_info"])

    def receive(self, wire, info):
        typed = nccl_engine.NCCLWeightTransferUpdateInfo(**info)
        shapes = zip(typed.shapes, (getattr(torch, d) for d in typed.dtype_names), strict=True)
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter(zip(typed.names, shapes, strict=True)),
            group=End(wire.ends[self.world["replicas"].index(self)]),
            src=0,
            post_unpack_func=lambda ws: self.held.update((n, w.clone()) for n, w in ws),
            buffer_size_bytes=int(BUCKET_MB * 2**20),
            device="cpu",
        )

    async def set_version(self, version, timeout_s):
        self.told.append(("set_version", version))


@pytest.fixture
def world(monkeypatch, weights):
    """Make two servers with 1 and 2 workers, and GPUs that are CPUs."""
    world = {}
    engine = VLLMServer(urls=["http://127.0.0.1:9"], dtype="bfloat16")
    world["replicas"] = [Recorder("a", world), Recorder("b", world, workers=2)]
    engine.supervision.replicas = world["replicas"]
    engine._running = True
    engine.shapes = {name: weight.shape for name, weight in weights.items()}
    world["engine"] = engine

    def endpoint(info):
        world["info"], world["wire"] = info, Wire(2)
        return world["wire"]

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", endpoint)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, n: (stream,) * n)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return world


def connected(transport, engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        transport.connect(engine)
    assert transport._device == torch.device("cuda", 0)
    transport._device = torch.device("cpu")
    return transport


def test_nccl_sends_all_weights_to_all_servers(world, weights, monkeypatch):
    transport = connected(NCCLTransport(bucket_mb=BUCKET_MB), world["engine"], monkeypatch)
    for version, state in enumerate([weights, {n: w / 2 for n, w in weights.items()}], 3):
        transport.push(state.items(), version)
        for replica in world["replicas"]:
            assert replica.held.keys() == state.keys()
            assert all(torch.equal(replica.held[n], w.bfloat16()) for n, w in state.items())
            assert replica.version == version
            assert replica.told[-1] == ("set_version", version)
        assert world["engine"].version == version
    # Trainer and three workers in one group; it was made once.
    assert (world["info"].world_size, world["info"].packed) == (4, True)
    inits = [[args for step, args in r.told if step.startswith("init")] for r in world["replicas"]]
    assert [[args["init_info"]["rank_offset"] for args in each] for each in inits] == [[1], [2]]
    steps = [step for step, _ in world["replicas"][0].told]
    assert steps[1:] == ["start_weight_update", "update_weights", "set_version"] * 2
    wire = world["wire"]
    world["replicas"][0].life = 2  # started anew: all meet again
    transport.push(weights.items(), 5)
    assert wire.destroyed
    assert world["wire"] is not wire
    transport.close()
    assert world["wire"].destroyed


def test_what_goes_wrong_is_named(world, weights, monkeypatch):
    engine, (first, second) = world["engine"], world["replicas"]
    transport = connected(NCCLTransport(bucket_mb=BUCKET_MB, timeout_s=2.0), engine, monkeypatch)
    left = [item for item in weights.items() if item[0] != "model.norm.weight"]
    with pytest.raises(WeightSyncError, match=r"transfer failed: .*declared 'model\.norm\.weight'"):
        transport.push(left, 1)
    assert engine.version == -1
    last = list(weights)[-1]
    with pytest.raises(IncompleteWeightsError, match=rf"lacks 1 .*'{last}'"):
        transport.push(list(weights.items())[:-1], 1)
    other = dict(reversed(weights.items()))
    with pytest.raises(WeightSyncError, match=r"vLLM's nccl transfer failed: .*same order"):
        transport.push(other.items(), 1)
    second.fails_at["update_weights"] = ReplicaLost("b died")
    with pytest.raises(ReplicaLost, match="b died"):
        transport.push(weights.items(), 1)
    second.fails_at.clear()
    first.fails_at["init_weight_transfer_engine"] = WeightSyncError("a: Invalid init_info")
    with pytest.raises(WeightSyncError, match="a: Invalid init_info"):
        transport.push(weights.items(), 1)
    first.fails_at.clear()
    blocked = queue.Queue()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: blocked.get(timeout=20))
    transport.timeout_s = 0.3
    with pytest.raises(SyncTimeoutError, match=r"did not meet within timeout_s=0\.3"):
        transport.push(weights.items(), 1)
    blocked.put(None)


def test_ipc_tells_of_handles_as_vllm_reads_them(world, weights, monkeypatch):
    engine = world["engine"]
    engine.supervision.replicas = world["replicas"] = world["replicas"][:1]

    def producer(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):
        assert buffer_size_bytes == int(BUCKET_MB * 2**20)
        for item in iterator:
            tensor = post_iter_func(item)
            yield packed_tensor.PackedIpcChunk(
                [item[0]], [list(tensor.shape)], [str(tensor.dtype).split(".")[-1]],
                [tensor.nbytes], {gpu_uuid: (b"handle of", item[0])},
            )  # fmt: skip

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", producer)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-7")
    )
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    envs.disable_envs_cache()  # which an engine of another test has left
    transport = connected(IPCTransport(bucket_mb=BUCKET_MB), engine, monkeypatch)
    transport.push(weights.items(), 4)
    told = world["replicas"][0].told
    assert told[0] == ("init_weight_transfer_engine", {"init_info": {"packed": True}})
    assert told[1] == ("start_weight_update", {})
    assert told[-1] == ("set_version", 4)
    updates = [args["update_info"] for step, args in told if step == "update_weights"]
    read = [ipc_engine.IPCWeightTransferUpdateInfo(**info) for info in updates]
    assert [info.names for info in read] == [[name] for name in weights]
    assert all(i.ipc_handles == {"GPU-7": (b"handle of", i.names[0])} for i in read)
    assert all(i.dtype_names == ["bfloat16"] for i in read)
    transport.close()


def test_what_they_cannot_reach_is_refused(world, monkeypatch):
    engine = world["engine"]
    for kind in (NCCLTransport, IPCTransport):
        with pytest.raises(ConfigError, match=rf"{kind.__name__} needs GPUs .*backend: gloo"):
            kind().connect(engine)
        with pytest.raises(ConfigError, match=r"cannot reach TransformersEngine; use Memory"):
            kind().connect(TransformersEngine(device="cpu"))
    with pytest.raises(ConfigError, match=r"one server worker on its GPU, not for 1 and 3"):
        connected(IPCTransport(), engine, monkeypatch)
    ours = VLLMServer()
    with pytest.raises(ConfigError, match=r"options: {weight_transfer_config: {backend: ipc}}"):
        connected(IPCTransport(), ours, monkeypatch)
    theirs = VLLMServer(options={"weight_transfer_config": {"backend": "nccl"}})
    with pytest.raises(ConfigError, match=r"backend: nccl; leave that out, or use NCCLTransport"):
        MemoryTransport().connect(theirs)
    connected(NCCLTransport(), theirs, monkeypatch)
    command = server_command(theirs.settings.options)
    assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
