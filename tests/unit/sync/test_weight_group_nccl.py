"""Test a weight group over NCCL, which is not here: how it is made, and what its errors become.

What a real one does is written in torch's ProcessGroupNCCL: with TORCH_NCCL_BLOCKING_WAIT it starts
no watchdog, and ``wait`` aborts the communicator and raises when the time is over.
"""

import os
import threading
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from lightning_rl.errors import SyncTimeoutError
from lightning_rl.sync.group import BroadcastGroup

SWITCH = "TORCH_NCCL_BLOCKING_WAIT"


class NCCL:
    """Stands for torch.distributed.ProcessGroupNCCL; ``broken`` has no peer any more."""

    class Options:
        pass

    made: ClassVar[list["NCCL"]] = []

    def __init__(self, store, rank, size, options):
        self.rank, self.size, self.timeout = rank, size, options._timeout
        self.blocking = os.environ.get(SWITCH)
        self.sent, self.broken, self.aborted = [], None, False
        NCCL.made.append(self)

    def broadcast(self, tensors, options):
        if self.broken == "at once":
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        self.sent.append((tensors[0].numel(), options.timeout))
        return self

    def wait(self, timeout):
        if self.broken:
            raise RuntimeError(f"WorkNCCL timed out in blocking wait.\n{timeout}")

    def abort(self):
        self.aborted = True
        if self.broken == "for ever":
            raise RuntimeError("Future for ProcessGroup abort timed out after 3000 ms")


@pytest.fixture(autouse=True)
def nccl(monkeypatch):
    monkeypatch.setattr(NCCL, "made", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)


def pair():
    sender = BroadcastGroup("127.0.0.1", 0, 0, 2, "nccl", 3.0, torch.device("cpu"))
    receiver = BroadcastGroup("127.0.0.1", sender.port, 1, 2, "nccl", 3.0, torch.device("cpu"))
    thread = threading.Thread(target=receiver.meet)
    thread.start()
    sender.meet()
    thread.join()
    return sender, receiver


@pytest.mark.parametrize("value", [None, "0"])
def test_it_has_no_watchdog_and_other_groups_are_made_as_before(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(SWITCH, raising=False)
    else:
        monkeypatch.setenv(SWITCH, value)
    pair()
    assert sorted((group.rank, group.size) for group in NCCL.made) == [(0, 2), (1, 2)]
    assert {(group.blocking, group.timeout) for group in NCCL.made} == {("1", timedelta(seconds=3))}
    # The communicator is made by a first broadcast, while all are there.
    assert all(group.sent == [(1, timedelta(seconds=3))] for group in NCCL.made)
    assert os.environ.get(SWITCH) == value


def test_nothing_is_made_before_all_are_there():
    group = BroadcastGroup("127.0.0.1", 0, 0, 2, "nccl", 0.3)
    with pytest.raises(SyncTimeoutError, match=r"did not meet .* within 0\.3 s"):
        group.meet()
    assert NCCL.made == []
    group.close()


@pytest.mark.parametrize("broken", ["later", "at once", "for ever"])
def test_a_dead_peer_is_an_error_of_ours(broken, caplog):
    sender, _ = pair()
    next(group for group in NCCL.made if group.rank == 0).broken = broken
    with pytest.raises(SyncTimeoutError, match=r"is gone: RuntimeError: (NCCL|WorkNCCL)[^\n]*$"):
        sender.wait(sender.broadcast(torch.zeros(4)))
    sender.close()
    assert next(group for group in NCCL.made if group.rank == 0).aborted
    assert ("left without an answer" in caplog.text) == (broken == "for ever")
