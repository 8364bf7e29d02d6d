"""Test groups by which weights are broadcast: peers that never come, hang, or leave."""

import subprocess
import sys
import threading

import pytest
import torch

from lightning_rl.errors import SyncTimeoutError
from lightning_rl.sync.group import BroadcastGroup

pytestmark = pytest.mark.timeout(60)


def test_a_peer_that_never_comes_is_an_error_in_time():
    group = BroadcastGroup("127.0.0.1", 0, rank=0, size=2, backend="gloo", timeout_s=0.5)
    with pytest.raises(SyncTimeoutError, match=r"2 processes .* did not meet .* within 0\.5 s"):
        group.meet()


def pair(timeout_s):
    sender = BroadcastGroup("127.0.0.1", 0, rank=0, size=2, backend="gloo", timeout_s=timeout_s)
    receiver = BroadcastGroup("127.0.0.1", sender.port, 1, 2, "gloo", timeout_s)
    thread = threading.Thread(target=receiver.meet)
    thread.start()
    sender.meet()
    thread.join()
    return sender, receiver


def test_a_stuck_peer_is_an_error_in_time():
    sender, receiver = pair(timeout_s=0.5)
    big = torch.zeros(2**22)
    with pytest.raises(SyncTimeoutError, match=r"did not take part .* within 0\.5 s"):
        sender.wait(sender.broadcast(big))
    receiver.close()


def test_a_peer_that_leaves_is_noticed_at_once():
    sender, receiver = pair(timeout_s=50)
    work = sender.broadcast(torch.zeros(2**22))
    receiver.close()
    with pytest.raises(SyncTimeoutError, match="is gone"):
        sender.wait(work)


LEAVES = """
import torch
from tests.unit.sync.test_weight_group import pair

sender, receiver = pair(timeout_s=0.5)
work = sender.broadcast(torch.zeros(2**22)) if {hangs} else None
sender.close_soon()
"""


@pytest.mark.parametrize("hangs", [False, True], ids=["idle", "hanging"])
def test_a_process_that_leaves_a_group_last_ends_cleanly(hangs):
    """The peer is idle, or hangs in a broadcast that it never takes."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES.format(hangs=hangs)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
