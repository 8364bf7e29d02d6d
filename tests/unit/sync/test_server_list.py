"""Test replicas that join and leave during a run, and the lists that say so."""

import asyncio
import os
import socket
from functools import partial

import pytest

from lightning_rl.engines.replicas.http import HTTPReplica
from lightning_rl.engines.replicas.replica import ReplicaLost, Timeouts
from lightning_rl.engines.replicas.server import VLLMServer
from lightning_rl.engines.replicas.server_list import (
    ServersByName,
    ServersInFile,
    follow,
    read_urls,
)
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import wait_for
from tests.support.thread_replicas import ThreadReplica, halved, holds

pytestmark = pytest.mark.timeout(60)
ONE = Sampling(max_tokens=1)


class HeldReplica(ThreadReplica):
    """A replica that answers when it is told to."""

    def __init__(self, name):
        super().__init__(name)
        self.answer = asyncio.Event()

    async def generate(self, token_ids, sampling, seed):
        completion = await super().generate(token_ids, sampling, seed)
        await self.answer.wait()
        return completion


@pytest.fixture(params=[MemoryTransport, partial(CollectiveTransport, timeout_s=10)])
def transport(request, engine):
    transport = request.param(bucket_mb=0.05)
    transport.connect(engine)
    yield transport
    transport.close()


async def in_loop(act, *arguments):
    return act(*arguments)


def join(engine, name):
    replica = ThreadReplica(name)
    run_async(in_loop(engine.supervision.join, replica))
    return replica


def leave(engine, replica):
    run_async(in_loop(engine.supervision.leave, replica))


def test_a_replica_that_joins_is_filled_and_serves(transport, engine, weights, caplog):
    transport.push(weights.items(), 0)
    third = join(engine, "replica 2")
    wait_for(lambda: third.version == 0)
    assert holds(third, weights)
    assert "replica 2 has joined the engine" in caplog.text

    async def three_at_once():
        return await asyncio.gather(*(engine.generate([3], ONE, seed) for seed in range(3)))

    assert [c.token_ids for c in run_async(three_at_once())] == [[0], [1], [2]]
    assert [replica.generated for replica in engine.replicas] == [1, 1, 1]
    state = halved(weights)
    transport.push(state.items(), 1)
    assert all(holds(replica, state) for replica in engine.replicas)


def test_one_that_left_gets_nothing_any_more(transport, engine, weights, caplog):
    transport.push(weights.items(), 0)
    first, second = engine.replicas
    leave(engine, first)
    wait_for(lambda: not first.alive)
    assert "replica 0 has left the engine (unanswered requests: 0)" in caplog.text
    for seed in range(3):
        run_async(engine.generate([3], ONE, seed))
    assert (first.generated, second.generated) == (0, 3)
    state = halved(weights)
    transport.push(state.items(), 1)
    assert holds(second, state)
    assert holds(first, weights)
    assert [status.name for status in engine.replica_states()] == ["replica 1"]


def test_all_may_leave_and_others_come(transport, engine, weights):
    transport.push(weights.items(), 0)
    for replica in list(engine.replicas):
        leave(engine, replica)
    assert engine.running
    state = halved(weights)
    transport.push(state.items(), 1)  # to nobody, for who joins next

    async def ask_nobody():
        waiting = asyncio.create_task(engine.generate([3], ONE, 5))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engine.supervision.join(ThreadReplica("replica 2"))
        return await waiting

    completion = run_async(ask_nobody())
    assert (completion.token_ids, completion.versions) == ([5], [1])
    assert holds(engine.replicas[0], state)


def with_one_that_is_asked(engine, weights):
    """Return a transport that has pushed version 3, and a third replica, which is asked next."""
    transport = MemoryTransport()
    transport.connect(engine)
    transport.push(weights.items(), 3)
    third = HeldReplica("replica 2")
    run_async(in_loop(engine.supervision.join, third))
    wait_for(lambda: third.version == 3)
    for other in engine.replicas[:2]:
        other.load = 9
    return transport, third


def asked(engine, leaving, then):
    """Ask ``leaving`` for a completion before it leaves; then let something happen."""

    async def run():
        request = asyncio.create_task(engine.generate([3], ONE, 7))
        await asyncio.sleep(0.01)
        assert leaving.load == 1
        engine.supervision.leave(leaving)
        await asyncio.sleep(0.2)
        assert leaving.alive  # it is given the time
        assert engine.in_flight == 9 + 9 + 1
        await then()
        return await request

    return run_async(run())


def test_who_leaves_may_end_what_it_writes(engine, weights):
    transport, leaving = with_one_that_is_asked(engine, weights)

    async def let_it_answer():
        leaving.answer.set()

    completion = asked(engine, leaving, let_it_answer)
    assert (completion.token_ids, completion.versions) == ([7], [3])
    assert [other.generated for other in engine.replicas] == [0, 0]
    wait_for(lambda: not leaving.alive)
    transport.close()


def test_what_it_writes_when_weights_change_is_generated_elsewhere(engine, weights, caplog):
    transport, leaving = with_one_that_is_asked(engine, weights)

    async def push():
        await asyncio.to_thread(transport.push, weights.items(), 4)

    completion = asked(engine, leaving, push)
    assert (completion.token_ids, completion.versions) == ([7], [4])
    assert "replica 2 has left the engine (unanswered requests: 1)" in caplog.text
    transport.close()


def test_a_machine_that_vanished_is_not_waited_for(engine, weights):
    """It neither answers nor refuses; its health is what tells."""
    engine.load_weights(weights.items(), 0)
    silent = HeldReplica("replica 2")
    silent.version = 0
    silent.gone.clear()
    run_async(in_loop(engine.supervision.join, silent))
    engine.replicas[0].load = engine.replicas[1].load = 9

    async def run():
        request = asyncio.create_task(engine.generate([3], ONE, 7))
        await asyncio.sleep(0.01)
        assert silent.load == 1
        engine.lost(silent, EngineError("replica 2 does not answer"))
        return await request

    assert run_async(run()).token_ids == [7]
    assert silent.load == 0


def test_a_call_while_a_server_is_closed_finds_it_lost():
    """A server may leave in the middle of a push."""

    class Closing:
        async def close(self):
            await asyncio.sleep(0.05)

        def request(self, *arguments, **options):
            raise RuntimeError("Session is closed")  # as aiohttp's then

    async def run():
        replica = HTTPReplica("http://127.0.0.1:9", "", None, False, Timeouts(1.0, 1.0, 1.0))
        replica._session = Closing()
        closing = asyncio.create_task(replica.close())
        await asyncio.sleep(0)
        with pytest.raises(ReplicaLost, match=r"http://127\.0\.0\.1:9 is closed"):
            await replica.pause()
        await closing

    run_async(run())


# -------------------------------------------------------------------- the lists


def write(path, *lines):
    (path.parent / "new").write_text("".join(f"{line}\n" for line in lines))
    os.replace(path.parent / "new", path)


def test_replicas_follow_a_file(tmp_path, engine, weights, caplog):
    engine.load_weights(weights.items(), 0)
    path = tmp_path / "servers.txt"
    a, b, c = (f"http://10.0.0.{n}:8000" for n in (1, 2, 3))
    for replica, name in zip(engine.replicas, (a, b), strict=True):
        replica.name = name
    write(path, a, b)

    async def start():
        return asyncio.create_task(
            follow(ServersInFile(str(path)), engine.supervision, ThreadReplica, 0.01)
        )

    def names():
        return [replica.name for replica in engine.replicas]

    following = run_async(start())
    write(path, f"{a}/  # the first", "", b, c)
    wait_for(lambda: names() == [a, b, c])
    write(path, "# all but one", c)
    wait_for(lambda: names() == [c])
    write(path, "10.0.0.1:8000")
    wait_for(
        lambda: (
            "servers stay as they are: urls: '10.0.0.1:8000' must have the form http" in caplog.text
        )
    )
    path.unlink()
    wait_for(lambda: "servers stay as they are: [Errno 2]" in caplog.text)
    assert names() == [c]
    assert caplog.text.count("servers stay as they are") == 2  # each once
    write(path, a)
    wait_for(lambda: names() == [a])
    run_async(in_loop(following.cancel))


def test_all_addresses_of_a_name_are_servers(monkeypatch):
    def addresses(host, port, **options):
        assert (host, port) == ("engines", 8000)
        ends = ["10.0.0.8", "10.0.0.7", "10.0.0.8"]
        found = [(socket.AF_INET, options["type"], 6, "", (end, port)) for end in ends]
        return [*found, (socket.AF_INET6, options["type"], 6, "", ("fd00::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    assert read_urls(ServersByName("http://engines:8000/")) == [
        "http://10.0.0.7:8000", "http://10.0.0.8:8000", "http://[fd00::1]:8000",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"'engines:8000' must have the form http://host:port"):
        ServersByName("engines:8000")


def test_a_list_without_servers_is_told(tmp_path):
    path = tmp_path / "servers.txt"
    engine = VLLMServer(urls=ServersInFile(str(path)))
    with pytest.raises(EngineError, match=r"ServersInFile cannot be read: .*servers\.txt"):
        engine._make_replicas(tmp_path)
    path.write_text("# none yet\n")
    with pytest.raises(EngineError, match=r"ServersInFile contains no server; start one"):
        engine._make_replicas(tmp_path)
    path.write_text("http://10.0.0.1:8000/\nhttp://10.0.0.1:8000\n")
    assert [replica.name for replica in engine._make_replicas(tmp_path)] == ["http://10.0.0.1:8000"]
    with pytest.raises(ConfigError, match=r"leave out replicas and devices, or leave out urls"):
        VLLMServer(urls=ServersInFile(str(path)), replicas=2)
