"""A process group of its own, beside whatever group the trainer trains with."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rl.errors import ConfigError, SyncTimeoutError

_log = logging.getLogger(__name__)


class BroadcastGroup:
    """One sender (rank 0) and its receivers, that meet at a store; never the default group.

    Args:
        host: the sender's address, as receivers reach it; the store listens there only.
        port: where its store listens; 0 for the sender itself: any.
        rank: 0 sends.
        size: how many processes meet.
        backend: ``gloo`` (CPU) or ``nccl`` (GPU).
        timeout_s: for meeting, and for each broadcast.
        device: on which tensors lie that are broadcast; None: the CPU.

    Raises:
        SyncTimeoutError: if they do not meet in time.
        ConfigError: for a ``host`` that is no address of the sender's machine.
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
        """Where the store listens."""
        return int(self._store.port)

    def meet(self) -> None:
        """Wait for the others."""
        try:
            self._group = _BACKENDS[self.backend](self)
        except (RuntimeError, ValueError) as error:
            raise SyncTimeoutError(
                f"the {self.size} processes of a weight group did not meet at {self.host}:"
                f"{self.port} within {self._timeout.total_seconds():g} s: {_first_line(error)}"
            ) from error

    def broadcast(self, tensor: Tensor) -> Any:
        """Send (rank 0) or receive in place; ``wait`` for what it returns.

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
                f"a broadcast of weights did not begin, a peer is gone: {_first_line(error)}"
            ) from error

    def wait(self, work: Any) -> None:
        """Until a broadcast is done.

        Raises:
            SyncTimeoutError: if a peer is stuck or gone.
        """
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise SyncTimeoutError(
                f"a peer did not take part in a broadcast of weights within "
                f"{self._timeout.total_seconds():g} s, or is gone: {_first_line(error)}"
            ) from error

    def close(self) -> None:
        """Leave, whatever is under way; those that wait for us learn of it at once."""
        if self._group is not None:
            try:
                self._group.abort()
            except RuntimeError as error:  # nobody can do more about it
                _log.warning("a weight group was left without an answer: %s", _first_line(error))
            self._group = None

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
        """Of the interface that leads to the sender: loopback stays on loopback."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Groups of NCCL that are made here raise errors where one waits, and end no process.

    Else a thread of torch's watches them, and when a broadcast is not done in time, takes the whole
    process down. Where waiting blocks there is no such thread: ``wait`` looks at the clock itself,
    aborts the communicator and raises. A group reads this when it is made, and no other is to.
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
    """A socket that listens at this address and no other."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"host={host!r} cannot be listened at ({error}); give an address of this machine that "
            "the engine's processes reach"
        ) from error


def require_backend(backend: str) -> None:
    """Refuse a backend that this machine has not.

    Raises:
        ConfigError: naming the other one.
    """
    if backend not in _BACKENDS:
        raise ConfigError(f"backend={backend!r} must be one of {sorted(_BACKENDS)}")
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError("backend='nccl' needs GPUs on both sides; use gloo")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
