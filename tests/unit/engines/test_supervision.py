"""Test Supervision: who of an engine's replicas serves."""

import asyncio

from lightning_rl.engines.replicas.supervision import Supervision
from tests.support.thread_replicas import ThreadReplica


def test_it_closes_in_another_event_loop_than_it_watched_in():
    """A loop is given up where a call in it hangs; what watched in it ends with it."""
    replica = ThreadReplica("replica 0")

    async def bring_back(replica: ThreadReplica) -> None:
        raise AssertionError("it was never lost")

    async def join() -> Supervision:
        supervision = Supervision(bring_back, lambda: 0, health_every_s=60.0)
        supervision.join(replica)
        await asyncio.sleep(0)  # it begins to watch
        return supervision

    given_up = asyncio.new_event_loop()
    supervision = given_up.run_until_complete(join())
    asyncio.run(supervision.close())
    assert replica.gone.is_set()
    assert supervision.replicas == []
    for task in asyncio.all_tasks(given_up):
        task.cancel()
    given_up.run_until_complete(asyncio.sleep(0))
    given_up.close()
