"""Test replicas that die, are cut off and come back; they are threads, with the real receivers."""

import asyncio
import re

import pytest

from lightning_rl.engines.base import ReplicaStatus, RunState
from lightning_rl.engines.replicas.replica import ReplicaLost
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import EngineError, IncompleteWeightsError, ReplicaError, SyncTimeoutError
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import wait_for
from tests.support.thread_replicas import halved, holds, lose

pytestmark = pytest.mark.timeout(60)
ONE = Sampling(max_tokens=1)


def test_a_replica_that_dies_in_a_push_gets_it_later(connect, engine, weights):
    transport = connect()
    transport.push(weights.items(), 0)
    doomed, other = engine.replicas
    doomed.dies_at = "update_weights"
    state = halved(weights)
    transport.push(state.items(), 1)
    assert holds(other, state)
    wait_for(lambda: doomed.version == 1)
    assert doomed.life == 2
    assert holds(doomed, state)


def test_the_group_of_a_replica_that_dies_is_left_at_once(engine, weights):
    """A broadcast that waits for it would keep a GPU busy for as long as it is not aborted."""
    transport = CollectiveTransport(bucket_mb=0.05, timeout_s=10)
    transport.connect(engine)
    transport.push(weights.items(), 0)
    doomed, other = engine.replicas
    group = transport._group
    doomed.dies_at, doomed.starts = "update_weights", False
    transport.push(halved(weights).items(), 1)
    assert holds(other, halved(weights))
    assert transport._group.size == 2
    doomed.receiver.close()  # as its process does when it ends
    wait_for(lambda: group._group is None)
    # One that refuses ends the push, and no group is left in the middle of something.
    with pytest.raises(IncompleteWeightsError):
        transport.push(list(weights.items())[1:], 2)
    assert transport._group is None
    transport.push(weights.items(), 3)
    assert holds(other, weights)
    transport.close()


def test_without_a_copy_a_broadcast_that_is_lost_cannot_be_repeated(engine, weights):
    transport = CollectiveTransport(bucket_mb=0.05, timeout_s=10, keep_copy=False)
    transport.connect(engine)
    transport.push(weights.items(), 0)
    doomed, other = engine.replicas
    doomed.dies_at = "update_weights"
    with pytest.raises(ReplicaLost, match=r"no replica has got version 1.* set keep_copy: true"):
        transport.push(halved(weights).items(), 1)
    transport.push(weights.items(), 2)
    assert holds(other, weights)
    transport.close()


@pytest.mark.parametrize("lost", [1, 2])
def test_servers_that_are_cut_off_in_a_push_are_waited_for(connect, engine, weights, lost):
    """They are not ours to start anew, so they come back as the processes that they were."""
    transport = connect()
    transport.push(weights.items(), 0)
    state = halved(weights)
    cut = engine.replicas[:lost]
    for replica in cut:
        replica.can_restart, replica.cut_off = False, True
    transport.push(state.items(), 1)
    assert engine.version == 1
    assert [replica.alive for replica in engine.replicas] == [False] * lost + [True] * (2 - lost)

    async def generate_meanwhile():
        waiting = asyncio.create_task(engine.generate([3], ONE, 0))
        await asyncio.sleep(0.05)
        assert waiting.done() == (lost == 1)  # the other one, or nobody
        for replica in cut:
            replica.cut_off = False
        return await waiting

    assert run_async(generate_meanwhile()).versions == [1]
    wait_for(lambda: all(replica.version == 1 for replica in engine.replicas))
    assert all(holds(replica, state) for replica in engine.replicas)
    assert not any(replica.paused for replica in engine.replicas)


def test_a_server_that_is_cut_off_while_it_is_paused_is_waited_for(engine, weights):
    engine.load_weights(weights.items(), 0)
    replica, other = engine.replicas
    transport = MemoryTransport()
    transport.connect(engine)
    pause = replica.pause

    async def too_late():
        replica.pause = pause
        raise SyncTimeoutError(f"{replica.name}/pause did not answer within 60 s")

    replica.pause = too_late
    transport.push(halved(weights).items(), 1)
    assert other.version == 1
    wait_for(lambda: replica.version == 1)
    transport.close()


def test_equal_losses_of_a_replica_are_told_once_and_then_counted(engine, weights, caplog):
    transport = MemoryTransport()
    transport.connect(engine)
    transport.push(weights.items(), 0)
    doomed = engine.replicas[0]
    doomed.starts = False

    async def lose_often():
        for _ in range(292):
            engine.lost(doomed, ReplicaLost("replica 0: connection refused"))
        engine.lost(doomed, ReplicaLost("replica 0: no route to host"))

    run_async(lose_often())
    told = [r.getMessage() for r in caplog.records if "connection refused" in r.getMessage()]
    assert told == [
        "lost a replica of the engine: replica 0: connection refused",
        "lost a replica of the engine, 10 times by now: replica 0: connection refused",
        "lost a replica of the engine, 100 times by now: replica 0: connection refused",
    ]
    assert "lost a replica of the engine: replica 0: no route to host" in caplog.text
    doomed.starts = True
    wait_for(lambda: doomed.version == 0 and "replica 0 is back" in caplog.text)
    # Those, and as many attempts to start it as there was time for.
    meanwhile = re.search(r"replica 0 is back \(failures meanwhile: (\d+)\)", caplog.text)
    assert int(meanwhile[1]) >= 293
    run_async(lose(engine, doomed))  # another time, which is told again
    assert caplog.text.count("lost a replica of the engine: injected") == 1
    transport.close()


@pytest.mark.parametrize("connect", ["memory"], indirect=True)
def test_what_each_replica_is_doing(connect, engine, weights):
    def states():
        return [replica.state for replica in engine.replica_states()]

    assert states() == [RunState.WAITING] * 2  # for the first push
    transport = connect()
    transport.push(weights.items(), 0)
    assert states() == [RunState.RUNNING] * 2
    run_async(engine.pause())
    assert states() == [RunState.WAITING] * 2
    run_async(engine.resume())
    engine.refill = None
    engine.replicas[0].starts = False
    run_async(lose(engine, engine.replicas[0]))
    assert states() == [RunState.STOPPED, RunState.RUNNING]
    engine.replicas[0].starts = True
    wait_for(lambda: engine.replicas[0].alive)
    assert states() == [RunState.WAITING, RunState.RUNNING]  # it is back, but empty
    transport.push(weights.items(), 1)
    assert engine.replica_states() == [
        ReplicaStatus(f"replica {i}", RunState.RUNNING, version=1, in_flight=0) for i in range(2)
    ]


def test_requests_of_a_dead_replica_go_to_another_once(engine, weights):
    engine.load_weights(weights.items(), 0)
    engine.replicas[0].dies_at = "generate"

    async def run():
        return await asyncio.gather(*(engine.generate([3], ONE, seed) for seed in range(8)))

    assert [c.token_ids for c in run_async(run())] == [[seed] for seed in range(8)]
    assert sum(replica.generated for replica in engine.replicas) == 8 + 1


def test_all_replicas_gone_is_an_error_in_time(engine, weights):
    engine.load_weights(weights.items(), 0)
    engine.recovery_timeout_s = 0.2
    for replica in engine.replicas:
        replica.starts = False
        run_async(lose(engine, replica))
    with pytest.raises(ReplicaError, match=r"none of 2 replicas came back .*=0\.2: replica 0"):
        run_async(engine.generate([3], ONE, 0))


def test_a_request_that_kills_whoever_takes_it_does_not_go_round_for_ever(engine, weights):
    transport = MemoryTransport()
    transport.connect(engine)
    transport.push(weights.items(), 0)

    async def poison(*_):
        raise ReplicaLost("poisoned")

    for replica in engine.replicas:
        replica.generate = poison
    with pytest.raises(EngineError, match=r"lost 4 replicas .*poisoned"):
        run_async(engine.generate([3], ONE, 0))
    transport.close()
