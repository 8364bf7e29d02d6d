"""Weight sync by vLLM's own weight transfer, to servers started with it; vLLM has both ends."""

import base64
import pickle
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.push import Push
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.engines.replicas.server import VLLMServer
from lightning_rl.engines.replicas.server_process import free_port
from lightning_rl.engines.vllm.process import last_line
from lightning_rl.errors import (
    ConfigError,
    LightningRLError,
    SyncTimeoutError,
    WeightSyncError,
    require_at_least,
)
from lightning_rl.run.processes.dist import world_size
from lightning_rl.sync.base import WeightTransport
from lightning_rl.sync.group import require_reachable
from lightning_rl.sync.replicas import submit
from lightning_rl.sync.stream import Weights


class Declared(NamedTuple):
    """A weight that will be pushed, in the form that vLLM asks for."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class PushedWeights:
    """The weights of a push, on the device and in the dtype to send; vLLM's ``source``."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.device = torch.device("cpu")
        self.weights: Weights = ()

    def metadata(self) -> list[Declared]:
        """Return the weights to come, in order."""
        return [Declared(name, self.dtype, tuple(shape)) for name, shape in self.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in Push.of(self.weights).checked(self.shapes):
            yield name, weight.to(self.device, self.dtype)


class ReplicaClient:
    """Requests each step of all replicas at the same time; vLLM's ``client``."""

    def __init__(self, replicas: list[Replica], timeout_s: float) -> None:
        self.replicas, self.timeout_s, self.version = replicas, timeout_s, -1
        self.refused: Future[None] = Future()  # never done, but with an error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect; in a group, each replica's workers follow those of the previous replica."""
        infos, rank = [], 1
        for replica in self.replicas:
            arguments = {"rank_offset": rank} if "rank_offset" in init_info else {}
            infos.append(init_info | arguments)
            rank += replica.workers
        try:
            self._all(
                replica.transfer("init_weight_transfer_engine", self.timeout_s, init_info=info)
                for replica, info in zip(self.replicas, infos, strict=True)
            )
        except Exception as error:
            self.refused.set_exception(error)
            raise

    def start_weight_update(self) -> None:
        """Begin a push."""
        self._all(replica.begin(self.timeout_s) for replica in self.replicas)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Announce weights; return when all replicas have loaded them."""
        info = dict(update_info)
        if (handles := info.pop("ipc_handles", None)) is not None:  # JSON has no bytes
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        arguments = {name: value for name, value in info.items() if value is not None}
        self._all(
            replica.transfer("update_weights", self.timeout_s, update_info=arguments)
            for replica in self.replicas
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End a push: replicas drop their caches, and take the version."""
        self._all(replica.set_version(self.version, self.timeout_s) for replica in self.replicas)

    def _all(self, calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
        for answer in [submit(call) for call in calls]:
            answer.result()


class NativeTransport(WeightTransport):
    """Base of the transports that use vLLM's weight transfer.

    Args:
        bucket_mb: MiB to pack together.
        timeout_s: time limit for meeting, for each step, and for a whole push.
    """

    reaches = (VLLMServer,)
    instead = "use MemoryTransport, or CollectiveTransport for RayEngine"
    backend: ClassVar[str]
    """vLLM's name of the transfer."""
    buffers: ClassVar[int]
    """Number of buffers of ``bucket_mb`` that a push needs on the GPU."""

    def __init__(self, bucket_mb: float, timeout_s: float) -> None:
        require_at_least(0.1, timeout_s=timeout_s)
        require_at_least(0.001, bucket_mb=bucket_mb)
        self.bucket_mb, self.timeout_s = bucket_mb, timeout_s
        self._engine: VLLMServer | None = None
        self._device = torch.device("cpu")
        self._met: list[tuple[Replica, int]] = []  # with the life in which each was connected
        self._sender: Any = None

    @property
    def gpu_bytes(self) -> int:
        return self.buffers * int(self.bucket_mb * 2**20)

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

    def push(self, weights: Weights, version: int) -> None:
        engine = self._engine
        if engine is None:
            raise WeightSyncError(
                f"{type(self).__name__} is not connected; call connect(engine) first"
            )
        with engine.taking_weights(version) as replicas:
            if not replicas:
                raise ReplicaLost(f"no server is alive for the push of version {version}")
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
        """Return the settings of vLLM's end in the trainer."""

    # ---------------------------------------------------------------- the push

    def _meet(self, engine: VLLMServer, replicas: list[Replica]) -> None:
        lives = [(replica, replica.life) for replica in replicas]
        if lives == self._met:
            return
        self._part()
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        client = ReplicaClient(replicas, self.timeout_s)
        source = PushedWeights(engine.shapes, getattr(torch, engine.dtype))
        info = self._init_info(sum(replica.workers for replica in replicas))
        meet = partial(
            WeightTransferTrainerFactory.trainer_init, info, client=client, source=source
        )
        self._sender = _in_time(meet, client, self._device)
        self._met = lives

    def _send(self, weights: Weights, version: int) -> None:
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
                    f"the push of version {version} took longer than timeout_s={self.timeout_s:g}"
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

    A server that dies fails the push, and a restarted server gets its weights only with the next
    push; :class:`CollectiveTransport` avoids both.

    Args:
        host: this machine's address, as the servers reach it.
        bucket_mb: MiB per broadcast.
        timeout_s: time limit for meeting, for each step, and for a whole push.
    """

    backend = "nccl"
    buffers = 3  # two are sent in turn, and of one its parts

    def __init__(
        self, host: str = "127.0.0.1", bucket_mb: float = 256.0, timeout_s: float = 300.0
    ) -> None:
        super().__init__(bucket_mb, timeout_s)
        self.host = host

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        assert isinstance(engine, VLLMServer)
        require_reachable(self, self.host, engine)

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
    """vLLM's ``ipc`` transfer: a server on the trainer's own GPU maps the weights in place.

    It is for one training process and one server without tensor parallelism, which share a GPU. The
    server unpickles messages; one at ``urls`` needs ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``.

    Args:
        bucket_mb: MiB to pack together, which is the memory that a push needs.
        timeout_s: time limit of each step, and of a whole push.
    """

    backend = "ipc"
    buffers = 1

    def __init__(self, bucket_mb: float = 256.0, timeout_s: float = 300.0) -> None:
        super().__init__(bucket_mb, timeout_s)

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        assert isinstance(engine, VLLMServer)
        apart = [replica.name for replica in engine.replicas if not replica.on_this_machine]
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


def _in_time(meet: Callable[[], Any], client: ReplicaClient, device: torch.device) -> Any:
    """Return ``meet()``, within a time limit and unless a server refuses: NCCL waits forever.

    Raises:
        SyncTimeoutError: if it takes too long.
        WeightSyncError: if it fails otherwise.
    """
    met: Future[Any] = Future()

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # which each thread has for itself
        try:
            met.set_result(meet())
        except Exception as error:
            met.set_exception(error)

    threading.Thread(target=run, name="meet_vllm", daemon=True).start()
    done, _ = wait((met, client.refused), client.timeout_s, FIRST_COMPLETED)
    if not done:
        raise SyncTimeoutError(f"the servers did not meet within timeout_s={client.timeout_s:g}")
    # Who refuses says why; vLLM's end then fails, too.
    answer = client.refused if client.refused in done else met
    try:
        return answer.result()
    except LightningRLError:
        raise
    except Exception as error:
        raise WeightSyncError(f"vLLM's weight transfer did not begin: {error}") from error
