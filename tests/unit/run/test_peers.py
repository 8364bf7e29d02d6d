"""Test which training process is gone: the question must end, whatever happened to the others."""

import multiprocessing
import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from lightning_rl.errors import PeerLostError
from lightning_rl.run.processes import peers
from lightning_rl.run.processes.machine import this_machine

pytestmark = pytest.mark.timeout(60)


def lost_connection():
    return RuntimeError(
        "gloo/transport/tcp/unbound_buffer.cc: Timed out waiting 1800000ms for recv"
    )


def hold_store(port):
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()  # until the test ends this process


@pytest.fixture
def rank_zero():
    """Yield a process that holds the ranks' store, and the client of this one, rank 1."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold_store, args=(there,))
    process.start()
    yield process, torch_dist.TCPStore("127.0.0.1", here.recv(), timeout=timedelta(seconds=50))
    process.kill()
    process.join()


def test_a_machine_that_vanished_with_the_store_is_named_in_time(monkeypatch, rank_zero):
    """Its connections stay open, and nothing answers: as a stopped process does."""
    process, store = rank_zero
    monkeypatch.setattr(torch_dist.distributed_c10d, "_get_default_store", lambda: store)
    elsewhere = peers.Peer("n1", "another machine", process.pid)
    monkeypatch.setattr(peers, "_peers", [elsewhere, peers.Peer.of_this_process()])
    monkeypatch.setattr(peers, "_REPORT_S", 0.5)
    os.kill(process.pid, signal.SIGSTOP)
    found = peers.lost_peer(lost_connection())
    assert isinstance(found, PeerLostError)
    assert "rank 0 (node n1) is gone" in str(found)


def test_a_process_that_ended_here_is_named(monkeypatch, rank_zero):
    process, store = rank_zero
    monkeypatch.setattr(torch_dist.distributed_c10d, "_get_default_store", lambda: store)
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    others = [peers.Peer("n1", this_machine(), pid) for pid in (process.pid, ended.pid)]
    monkeypatch.setattr(peers, "_peers", [*others, peers.Peer.of_this_process()])
    monkeypatch.setattr(peers, "_REPORT_S", 0.5)
    store.set(peers._key(0), "")  # rank 0 has noticed it, too
    assert "rank 1 (node n1) is gone" in str(peers.lost_peer(lost_connection()))
