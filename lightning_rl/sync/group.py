"""Process groups in which a trainer broadcasts weights, besides its own groups."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rl.engines.replicas.replica import LOOPBACK
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError, SyncTimeoutError, first_line
from lightning_rl.sync.memory import unpack
from lightning_rl.sync.stream import Bucket, WeightReceiver, Weights

_log = logging.getLogger(__name__)
_REFUSED = "refused"
_LOOK_S = 0.01


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

    def meet(self, refused: Callable[[], bool] = lambda: False) -> None:
        """Wait for the other processes; ``refused`` tells the sender that one will not come.

        Raises:
            SyncTimeoutError: if they do not come in time, or one has refused.
        """
        try:
            self._wait_for_all(refused)
            self._group = _BACKENDS[self.backend](self)
        except (RuntimeError, ValueError) as error:
            raise SyncTimeoutError(
                f"the {self.size} processes of a weight group did not meet at {self.host}:"
                f"{self.port} within {self._timeout.total_seconds():g} s: {first_line(error)}"
            ) from error

    def _wait_for_all(self, refused: Callable[[], bool]) -> None:
        """Wait here, where a refusal ends all waits at once: in the backends nothing would.

        NCCL's communicator would even wait for ever.
        """
        end = time.monotonic() + self._timeout.total_seconds()
        self._store.set(f"here/{self.rank}", "")
        while not self._store.check([f"here/{rank}" for rank in range(self.size)]):
            if refused():
                self._store.set(_REFUSED, "")
            if self._store.check([_REFUSED]):
                raise RuntimeError("another process refused to join")
            if time.monotonic() > end:
                raise RuntimeError("the others did not come")
            time.sleep(_LOOK_S)

    def absent(self) -> list[int]:
        """Return the ranks that have not come to meet."""
        return [rank for rank in range(self.size) if not self._store.check([f"here/{rank}"])]

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
        """Leave in the background: gloo blocks until a send to a hanging peer has timed out.

        The interpreter waits for the thread at exit: one that comes back from ``abort`` after
        Python has shut down would end the process with SIGABRT.
        """
        threading.Thread(target=self.close, name="leave_group").start()

    def _gloo(self) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address())]
        options._timeout = self._timeout
        return dist.ProcessGroupGloo(self._prefixed(), self.rank, self.size, options)

    def _nccl(self) -> Any:
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


def require_reachable(transport: object, host: str, engine: ReplicatedEngine) -> None:
    """Refuse a loopback address of the sender if a replica is on another machine.

    Raises:
        ConfigError: names the replica.
    """
    apart = [replica.name for replica in engine.replicas if not _is_here(replica.host)]
    if apart and host in LOOPBACK:
        raise ConfigError(
            f"{type(transport).__name__}(host={host!r}) cannot be reached by {apart[0]} on another "
            "machine; set host to this machine's address in the network that both share"
        )


def _is_here(host: str) -> bool:
    """Return True if ``host`` is an address of this machine: one that can be listened at."""
    try:
        _listen(host, 0).close()
    except ConfigError:
        return False
    return True


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
