"""vLLM's own weight transfer, of which it brings both ends, to servers started with it."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replica import Replica, ReplicaLost
from lightning_rl.engines.server_process import free_port
from lightning_rl.engines.vllm_process import last_line
from lightning_rl.engines.vllm_server import VLLMServer
from lightning_rl.errors import (
    ConfigError,
    LightningRLError,
    SyncTimeoutError,
    WeightSyncError,
    require_at_least,
)
from lightning_rl.run.dist import world_size
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.memory import THIS_MACHINE
from lightning_rl.sync.native_client import Fleet, Stream


class NativeTransport(WeightTransport):
    """What both have in common.

    Args:
        bucket_mb: MiB that are packed together.
        timeout_s: for meeting, for each step, and for a whole push.
    """

    reaches = (VLLMServer,)
    instead = "use MemoryTransport, or CollectiveTransport for RayEngine"
    backend: ClassVar[str]
    """vLLM's name of it."""

    def __init__(self, bucket_mb: float, timeout_s: float) -> None:
        require_at_least(0.1, timeout_s=timeout_s)
        require_at_least(0.001, bucket_mb=bucket_mb)
        self.bucket_mb, self.timeout_s = bucket_mb, timeout_s
        self._engine: VLLMServer | None = None
        self._device = torch.device("cpu")
        self._met: list[tuple[Replica, int]] = []  # with the life in which each was connected
        self._sender: Any = None

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        assert isinstance(engine, VLLMServer)
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{type(self).__name__} needs GPUs on both sides; on CPUs use MemoryTransport, or "
                "CollectiveTransport with backend: gloo"
            )
        if engine.urls is None and engine.transfer_backend != self.backend:
            raise ConfigError(
                f"{type(self).__name__} needs servers with vLLM's {self.backend!r} transfer; give "
                f"the engine options: {{weight_transfer_config: {{backend: {self.backend}}}}}"
            )
        self._engine = engine
        self._device = torch.device("cuda", torch.cuda.current_device())

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        engine = self._engine
        if engine is None:
            raise WeightSyncError(f"{type(self).__name__}.push before connect(engine)")
        with engine.taking_weights(version) as replicas:
            if not replicas:
                raise ReplicaLost(f"no server is left for the push of version {version}")
            try:
                self._meet(engine, replicas)
                self._send(weights, version)
            except BaseException:
                self._part()  # one group for all, and who knows in which state it is
                raise
            for replica in replicas:
                replica.version = version

    def close(self) -> None:
        self._part()
        self._engine = None

    @abstractmethod
    def _init_info(self, workers: int) -> Any:
        """What vLLM's end in the trainer is made of."""

    # ---------------------------------------------------------------- the push

    def _meet(self, engine: VLLMServer, replicas: list[Replica]) -> None:
        lives = [(replica, replica.life) for replica in replicas]
        if lives == self._met:
            return
        self._part()
        fleet = Fleet(replicas, self.timeout_s)
        stream = Stream(engine.shapes, getattr(torch, engine.dtype))
        info = self._init_info(sum(replica.workers for replica in replicas))
        self._sender = _in_time(lambda: _vllms_end(info, fleet, stream), fleet, self._device)
        self._met = lives

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        sender = self._sender
        sender.client.version = version
        sender.source.weights, sender.source.device = weights, self._device
        # Nothing in a broadcast of vLLM's looks at the clock: this ends it.
        limit = threading.Timer(self.timeout_s, sender.shutdown)
        limit.daemon = True
        limit.start()
        try:
            sender.send_weights()
        except LightningRLError:
            raise
        except Exception as error:
            if limit.finished.is_set():
                raise SyncTimeoutError(
                    f"the push of version {version} was not done within {self.timeout_s:g} s"
                ) from error
            raise WeightSyncError(
                f"vLLM's {self.backend} transfer failed: {last_line(error)}"
            ) from error
        finally:
            limit.cancel()
            sender.source.weights = ()

    def _part(self) -> None:
        sender, self._sender, self._met = self._sender, None, []
        if sender is not None:
            sender.shutdown()


@configurable
class NCCLTransport(NativeTransport):
    """vLLM's ``nccl`` transfer: one broadcast, in a group of the trainer and all servers' GPUs.

    A server that dies ends the push, and one that was started anew gets its weights with the next
    one: :class:`CollectiveTransport` outlives the first and saves the second.

    Args:
        host: this machine's address, as the servers reach it.
        bucket_mb: MiB per broadcast.
        timeout_s: for meeting, for each step, and for a whole push.
    """

    backend = "nccl"

    def __init__(
        self, host: str = "127.0.0.1", bucket_mb: float = 256.0, timeout_s: float = 300.0
    ) -> None:
        super().__init__(bucket_mb, timeout_s)
        self.host = host

    def _init_info(self, workers: int) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            master_address=self.host,
            master_port=free_port(self.host),
            world_size=1 + workers,
            packed_buffer_size_bytes=int(self.bucket_mb * 2**20),
            rank=0,
        )


@configurable
class IPCTransport(NativeTransport):
    """vLLM's ``ipc`` transfer: a server on the trainer's own GPU opens the weights where they lie.

    For one training process and one server without tensor parallelism, which share a GPU. The
    server unpickles what it is told; one at ``urls`` needs ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``.

    Args:
        bucket_mb: MiB that are packed together, and so the memory that a push takes.
        timeout_s: for each step, and for a whole push.
    """

    backend = "ipc"

    def __init__(self, bucket_mb: float = 256.0, timeout_s: float = 300.0) -> None:
        super().__init__(bucket_mb, timeout_s)

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        assert isinstance(engine, VLLMServer)
        apart = [replica.name for replica in engine.replicas if replica.host not in THIS_MACHINE]
        workers = sum(replica.workers for replica in engine.replicas)
        if apart or workers > 1 or world_size() > 1:
            raise ConfigError(
                f"IPCTransport is for one training process and one server worker on its GPU, not "
                f"for {world_size()} and {workers}{f', {apart[0]} elsewhere' if apart else ''}; "
                "use CollectiveTransport or NCCLTransport"
            )

    def _init_info(self, workers: int) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        size = int(self.bucket_mb * 2**20)
        return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)


def _vllms_end(info: Any, fleet: Fleet, stream: Stream) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory.trainer_init(info, client=fleet, source=stream)


def _in_time(make: Callable[[], Any], fleet: Fleet, device: torch.device) -> Any:
    """``make()``, unless a server refuses or it takes too long: NCCL waits for peers for ever.

    Raises:
        SyncTimeoutError: if it does.
    """
    made: list[Any] = []

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # which each thread has for itself
        try:
            made.append(make())
        except Exception as error:
            fleet.refused = fleet.refused or error

    thread = threading.Thread(target=run, name="meet_vllm", daemon=True)
    thread.start()
    waited, step = 0.0, 0.1
    while thread.is_alive() and fleet.refused is None and waited < fleet.timeout_s:
        thread.join(step)
        waited += step
    if isinstance(fleet.refused, LightningRLError):
        raise fleet.refused
    if fleet.refused is not None:
        raise WeightSyncError(f"vLLM's weight transfer did not begin: {fleet.refused}")
    if not made:
        raise SyncTimeoutError(f"the servers did not meet within {fleet.timeout_s:g} s")
    return made[0]
