"""The other training processes of a run: who they are, and which of them is gone."""

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as torch_dist

from lightning_rl.errors import PeerLostError
from lightning_rl.run.loop.threads import CallingThread
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.machine import this_machine

T = TypeVar("T")

_REPORT_S = 5.0
"""Seconds that the other processes have to notice, too, that one is gone."""
_LOOK_S = 0.1
_FOUND = "lost_peer"
_SIGNS = ("gloo/", "closed by peer", "Connection reset", "Broken pipe", "NCCL", "TCPStore")


class Peer(NamedTuple):
    """A training process: its node, for messages, and the machine on which its id is valid."""

    node: str
    machine: str
    process: int

    @classmethod
    def of_this_process(cls) -> "Peer":
        return cls(socket.gethostname(), this_machine(), os.getpid())


_peers: list[Peer] = []


def introduce() -> None:
    """Exchange the identities of all ranks; call it on every rank."""
    _peers[:] = dist.gather(Peer.of_this_process())


def lost_peer(error: BaseException) -> PeerLostError | None:
    """Return the error to raise if the given one was caused by another process's end; else None.

    A rank that notices it says so in the store through which the ranks have met. A rank whose
    process has ended, or that says nothing in time, is the one that is gone.
    """
    if len(_peers) < 2 or not _is_of_a_lost_connection(error):
        return None
    if not hasattr(error, _FOUND):
        gone = _who_is_gone()
        names = ", ".join(f"rank {rank} (node {_peers[rank].node})" for rank in gone)
        setattr(
            error,
            _FOUND,
            PeerLostError(
                f"{names or 'another training process'} is gone: it failed, was killed, ran out of "
                "memory, or its machine or network is down; its last output says which. The "
                "others cannot continue without it: run the same command with --ckpt_path last"
            ),
        )
    result: PeerLostError = getattr(error, _FOUND)
    return result


def _is_of_a_lost_connection(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, torch_dist.DistError | RuntimeError) and any(
            sign in str(chain) for sign in _SIGNS
        ):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _who_is_gone() -> list[int]:
    own = _peers.index(Peer.of_this_process())
    open_cases = [rank for rank in range(len(_peers)) if rank != own]
    gone: list[int] = []
    store, asking = torch_dist.distributed_c10d._get_default_store(), CallingThread("ask_ranks")
    end = time.monotonic() + _REPORT_S

    def ask(call: Callable[[], T]) -> T:
        # A node that vanished closes no connection: the kernel would wait for it for 16 minutes.
        answer = asking.submit(call)
        try:
            result: T = answer.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            asking.abandon(answer)
            raise
        return result

    try:
        while open_cases and time.monotonic() < end:
            gone += [rank for rank in open_cases if _has_ended(_peers[rank])]
            open_cases = [rank for rank in open_cases if rank not in gone]
            ask(partial(store.set, _key(own), ""))
            open_cases = [r for r in open_cases if not ask(partial(store.check, [_key(r)]))]
            time.sleep(_LOOK_S)
    except (RuntimeError, TimeoutError):  # who holds it is gone: rank 0, or who started the ranks
        open_cases = [0] if 0 in open_cases else []
    return gone or open_cases


def _key(rank: int) -> str:
    return f"lightning_rl/noticed/{rank}"


def _has_ended(peer: Peer) -> bool:
    """Return True if a process on this machine has ended; False for other machines."""
    if peer.machine != this_machine():
        return False
    try:
        state = Path(f"/proc/{peer.process}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return True
    return state.startswith("Z")
