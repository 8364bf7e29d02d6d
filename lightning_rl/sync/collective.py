"""Weight sync by broadcasts in a separate process group, besides the trainer's own groups."""

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.replica import Replica
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError, SyncTimeoutError, first_line, require_at_least
from lightning_rl.sync.memory import fill_buffers, unpack
from lightning_rl.sync.staged import StagedTransport
from lightning_rl.sync.stream import Bucket, WeightReceiver, Weights, WeightStream

_log = logging.getLogger(__name__)


class BroadcastGroup:
    """A group of one sender (rank 0) and its receivers, which meet at a TCP store.

    It is never the default group.

    Args:
        host: the sender's address, as receivers reach it; the store listens only there.
        port: the store's port; the sender may give 0, for any free one.
        rank: this process's rank; 0 sends.
        size: number of processes in the group.
        backend: ``gloo`` (CPU) or ``nccl`` (GPU).
        timeout_s: time limit for meeting, and for each broadcast.
        device: device of the broadcast tensors; None: the CPU.

    Raises:
        SyncTimeoutError: if they do not meet in time.
        ConfigError: if ``host`` is not an address of the sender's machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        backend: str,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.host, self.rank, self.size, self.backend = host, rank, size, backend
        self.device = device or torch.device("cpu")
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        # Else it would listen on all interfaces; the store owns the descriptor from then on.
        listening = _listen(host, port) if rank == 0 else None
        self._store = dist.TCPStore(
            host,
            port if listening is None else listening.getsockname()[1],
            is_master=rank == 0,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )

    @property
    def port(self) -> int:
        """The port on which the store listens."""
        return int(self._store.port)

    def meet(self) -> None:
        """Wait for the other processes.

        Raises:
            SyncTimeoutError: if they do not come in time.
        """
        try:
            self._group = _BACKENDS[self.backend](self)
        except (RuntimeError, ValueError) as error:
            raise SyncTimeoutError(
                f"the {self.size} processes of a weight group did not meet at {self.host}:"
                f"{self.port} within {self._timeout.total_seconds():g} s: {first_line(error)}"
            ) from error

    def broadcast(self, tensor: Tensor) -> Any:
        """Start sending (rank 0) or receiving ``tensor`` in place; pass the result to ``wait``.

        Raises:
            SyncTimeoutError: if a peer is known to be gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._timeout
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise SyncTimeoutError(
                f"a broadcast of weights could not begin because a peer is gone: "
                f"{first_line(error)}"
            ) from error

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is done.

        Raises:
            SyncTimeoutError: if a peer hangs or is gone.
        """
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise SyncTimeoutError(
                f"a peer did not take part in a broadcast of weights within "
                f"{self._timeout.total_seconds():g} s, or is gone: {first_line(error)}"
            ) from error

    def close(self) -> None:
        """Leave the group at once, aborting any broadcast; waiting peers get an error."""
        if self._group is not None:
            try:
                self._group.abort()
            except RuntimeError as error:  # nobody can do more about it
                _log.warning("a weight group was left without an answer: %s", first_line(error))
            self._group = None

    def close_soon(self) -> None:
        """Leave in the background: gloo blocks until a send to a hanging peer has timed out."""
        threading.Thread(target=self.close, name="leave_group", daemon=True).start()

    def _gloo(self) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address())]
        options._timeout = self._timeout
        return dist.ProcessGroupGloo(self._prefixed(), self.rank, self.size, options)

    def _nccl(self) -> Any:
        # Unlike gloo's, its constructor waits for nobody, and a communicator that begins without a
        # peer waits for ever.
        self._store.set(f"here/{self.rank}", "")
        self._store.wait([f"here/{rank}" for rank in range(self.size)], self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with _without_watchdog():
            group = dist.ProcessGroupNCCL(self._prefixed(), self.rank, self.size, options)
        # The first broadcast makes the communicator: now, while all are here.
        self._group = group
        self.wait(self.broadcast(torch.zeros(1, device=self.device)))
        return group

    def _prefixed(self) -> Any:
        return dist.PrefixStore("lightning_rl", self._store)

    def _own_address(self) -> str:
        """Return the address of the interface that leads to the sender; loopback for loopback."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make NCCL groups created here raise errors in ``wait`` instead of ending the process.

    By default a watchdog thread of torch's ends the whole process if a broadcast is late. With
    blocking wait there is no such thread: ``wait`` checks the time itself, aborts the communicator
    and raises. A group reads the variable when it is made; other groups must not see it.
    """
    name, value = "TORCH_NCCL_BLOCKING_WAIT", os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ[name] = "1"
    try:
        yield
    finally:
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


_BACKENDS = {"gloo": BroadcastGroup._gloo, "nccl": BroadcastGroup._nccl}


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address only.

    Raises:
        ConfigError: if that is not possible.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at host={host!r} ({error}); give an address of this machine that "
            "the engine's processes reach"
        ) from error


def require_backend(backend: str) -> None:
    """Refuse a backend that this machine does not have.

    Raises:
        ConfigError: names the other one.
    """
    if backend not in _BACKENDS:
        raise ConfigError(f"backend={backend!r} must be one of {sorted(_BACKENDS)}")
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError("backend='nccl' needs GPUs on both sides; use gloo")


class BroadcastReceiver(WeightReceiver):
    """Receives weights by broadcasts in a process group.

    ``first`` is the group rank of this replica's first worker.
    """

    def __init__(self, device: torch.device, rank: int, first: int = 1, **options: Any) -> None:
        super().__init__(self._fetch)
        self._device = device
        self._group = BroadcastGroup(rank=first + rank, device=device, **options)
        self._group.meet()
        self._buffer = torch.empty(0)

    def _fetch(self, bucket: Bucket) -> Weights:
        dtype, numel = getattr(torch, bucket["dtype"]), bucket["numel"]
        if self._buffer.dtype != dtype or self._buffer.numel() < numel:
            self._buffer = torch.empty(numel, dtype=dtype, device=self._device)
        flat = self._buffer[:numel]
        self._group.wait(self._group.broadcast(flat))
        return unpack(flat, bucket)

    def fail(self) -> None:
        self._group.close()

    def close(self) -> None:
        self._group.close()


@configurable
class CollectiveTransport(StagedTransport):
    """Broadcasts to engines in other processes, also on other machines: NCCL on GPUs, gloo on CPUs.

    The trainer shares a separate group with each replica (besides the trainer's own groups), so a
    replica that dies or hangs does not affect the others; a restarted one joins again. The trainer
    sends all weights once per replica: for many, use :class:`SharedCollectiveTransport`.

    Args:
        backend: ``nccl`` or ``gloo``; None: ``nccl`` if this machine has a GPU.
        host: this machine's address, as the engines reach it.
        bucket_mb: MiB per broadcast.
        keep_copy: keep all buckets in host memory, as much as the engine's weights, to fill
            restarted replicas from. Otherwise two buckets are used in turn; with NCCL the GPU
            always holds only two.
        changed_only: send only buckets with a change, and load only modules that differ from what
            was sent last; needs ``keep_copy``.
        adapters_only: send a LoRA's base once, and then its adapters alone; needs ``keep_copy``.
        timeout_s: time limit for meeting, for each step of a push, and for each bucket.
    """

    stages_in_memory = leaves_out = True
    reaches = (ReplicatedEngine,)
    instead = (
        "that engine is in the trainer's own process: use MemoryTransport or CheckpointTransport"
    )

    def __init__(
        self,
        backend: str | None = None,
        host: str = "127.0.0.1",
        bucket_mb: float = 256.0,
        keep_copy: bool = True,
        changed_only: bool = False,
        adapters_only: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(timeout_s, keep_copy, changed_only, adapters_only)
        require_at_least(0.001, bucket_mb=bucket_mb)
        self.bucket_mb = bucket_mb
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        require_backend(self.backend)
        self.host = host
        self._copies_to_host = keep_copy and self.backend == "nccl"
        self._copies: dict[int, Tensor] = {}
        self._on_device: dict[int, int] = {}  # which slot each of two buffers holds
        self._device = torch.device("cpu")
        self._groups: dict[Replica, BroadcastGroup] = {}
        self._buffers: dict[int, Tensor] = {}
        # Held until the slot is used again.
        self._sending: dict[tuple[int, Replica], Any] = {}

    @property
    def gpu_bytes(self) -> int:
        return 2 * int(self.bucket_mb * 2**20) if self.backend == "nccl" else 0

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if self.backend == "nccl":
            # Asked here, for a thread that fills a restarted replica has a current device too: 0.
            self._device = torch.device("cuda", torch.cuda.current_device())

    def push(self, weights: Weights, version: int) -> None:
        super().push(weights, version)
        if self._copies_to_host and self._device.type == "cuda":
            # Another thread may read the copies, and the weights are about to change.
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._sending.clear()
        self._buffers.clear()
        self._copies.clear()
        self._on_device.clear()

    @classmethod
    def receiver(cls, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
        return BroadcastReceiver(device, rank, **options)

    def join(self, replica: Replica) -> None:
        self.leave(replica)
        self._groups[replica] = self._met([replica])

    def _met(self, replicas: Sequence[Replica]) -> BroadcastGroup:
        """Return a group of this process and all workers of these replicas, once they have met.

        Raises:
            SyncTimeoutError: if they do not meet in time.
        """
        options: dict[str, Any] = {
            "host": self.host,
            "size": 1 + sum(replica.workers for replica in replicas),
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }
        group = BroadcastGroup(port=0, rank=0, device=self._device, **options)
        joining, first = [], 1
        for replica in replicas:
            joining.append(self.invite(replica, port=group.port, first=first, **options))
            first += replica.workers
        try:
            group.meet()
        except SyncTimeoutError as error:
            group.close()
            for answer in joining:
                answer.result()  # says why, if the replica is gone or has refused
            names = ", ".join(replica.name for replica in replicas)
            raise SyncTimeoutError(f"{names}: {error}") from error
        for answer in joining:
            answer.result()
        return group

    def leave(self, replica: Replica) -> None:
        if (group := self._groups.pop(replica, None)) is not None:
            group.close_soon()

    def stage(self, weights: WeightStream) -> Iterator[Bucket]:
        for bucket, flat in fill_buffers(weights, self.bucket_mb, self.keep_copy, self._buffer):
            if self._copies_to_host:
                # Page-locked memory, so that the copy goes on while the bucket is sent and loaded.
                copy = _at_least(self._copies, bucket["slot"], len(flat), flat.dtype, None)
                copy.copy_(flat, non_blocking=True)
            yield bucket

    def _buffer(self, slot: int, numel: int, dtype: torch.dtype, is_read: bool) -> Tensor:
        if not self._copies_to_host:
            return _at_least(self._buffers, slot, numel, dtype, self._device)
        flat = _at_least(self._buffers, slot % 2, numel, dtype, self._device)
        if is_read and slot in self._copies:  # what was sent last
            flat.copy_(self._copies[slot][:numel], non_blocking=True)
        self._on_device[slot % 2] = slot
        return flat

    def _staged_flat(self, bucket: Bucket) -> Tensor:
        """Return a bucket's buffer; for a restarted replica, with the bucket's last content."""
        slot, numel = bucket["slot"], bucket["numel"]
        if not self._copies_to_host:
            return self._buffers[slot][:numel]
        if self._on_device.get(slot % 2) != slot:
            return self._buffer(slot, numel, getattr(torch, bucket["dtype"]), is_read=True)
        return self._buffers[slot % 2][:numel]

    def transmit(self, bucket: Bucket, replica: Replica) -> None:
        flat = self._staged_flat(bucket)
        # Nobody waits here: a replica answers its call when it has received all.
        try:
            self._sending[bucket["slot"], replica] = self._groups[replica].broadcast(flat)
        except SyncTimeoutError as error:
            raise SyncTimeoutError(f"{replica.name}: {error}") from error


def _at_least(
    held: dict[int, Tensor],
    number: int,
    numel: int,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Tensor:
    """Return the first ``numel`` elements of a held buffer, which is remade if it is too small.

    ``device`` None: in host memory, page-locked if there are GPUs.
    """
    buffer = held.get(number)
    if buffer is None or buffer.dtype != dtype or len(buffer) < numel:
        pinned = device is None and torch.cuda.is_available()
        held[number] = buffer = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
    return buffer[:numel]
