"""A server belongs to one run at a time: real HTTP, and a server without a model."""

import asyncio
import json
import threading
import time

import aiohttp
import pytest
import uvicorn

from lightning_rl.engines.replicas import http as http_replica
from lightning_rl.engines.replicas.http import HTTPReplica, ServerTaken
from lightning_rl.engines.replicas.replica import ReplicaLost, Timeouts
from lightning_rl.engines.replicas.server_access import CLAIM, ServerAccess
from lightning_rl.errors import EngineError
from lightning_rl.run.loop.background import run_async

KEY = "secret"
ANSWERS = {
    "/health": {},
    "/v1/models": {"data": [{"max_model_len": 64}]},
    "/get_world_size": {"world_size": 1},
    "/pause": {},
}


async def vllm(scope, receive, send):
    """Imitate as much of vLLM as a replica asks for before it serves."""
    if scope["type"] == "lifespan":
        return
    known = scope["path"] in ANSWERS
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200 if known else 404, "headers": headers})
    await send(
        {"type": "http.response.body", "body": json.dumps(ANSWERS.get(scope["path"])).encode()}
    )


def serve(app, port=0):
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)

    def stop():
        server.should_exit = True
        thread.join()

    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", stop


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(http_replica, "_CLAIM_AGAIN_S", 0.05)
    found, stop = serve(ServerAccess(vllm))
    yield found
    stop()


@pytest.fixture
def run(url):
    made = []

    def make(key=KEY, lease_s=20.0, at=url):
        made.append(HTTPReplica(at, key, None, False, Timeouts(10, 10, 10), lease_s=lease_s))
        return made[-1]

    yield make
    for replica in made:
        run_async(replica.close())


def test_a_second_run_is_refused_until_the_first_has_ended(run):
    first, second = run(lease_s=0.5), run()
    run_async(first.start())

    async def both():
        asking = asyncio.create_task(second.start())
        while not asking.done():  # as health is looked after
            assert await first.answers()
            await asyncio.sleep(0.1)
        with pytest.raises(ServerTaken, match="is used by another training run") as refused:
            await asking
        assert first._run in str(refused.value)

    run_async(both())
    run_async(first.pause())
    with pytest.raises(ServerTaken):
        run_async(second.pause())
    run_async(first.close())
    run_async(second.start())
    run_async(second.pause())


def test_a_run_that_was_killed_loses_its_servers(run, caplog):
    killed, resumed = run(lease_s=0.3), run()
    run_async(killed.start())
    run_async(resumed.start())
    assert "waiting for 0.3 s in case that run has ended" in caplog.text
    run_async(resumed.pause())
    with pytest.raises(ServerTaken):
        run_async(killed.pause())  # it was only asleep
    run_async(killed.close())  # and does not take it away
    run_async(resumed.pause())


def test_a_server_that_was_started_anew_is_lost_until_it_is_claimed(run, url):
    replica = run()
    run_async(replica.start())
    run_async(replica._call("DELETE", CLAIM))  # as it is in a new one
    with pytest.raises(ReplicaLost, match="has been restarted"):
        run_async(replica.pause())
    run_async(replica.start())
    run_async(replica.pause())


def test_requests_of_no_run_pass_but_claim_nothing(run, url):
    run_async(run().start())

    async def status(method, path):
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, f"{url}{path}") as answer,
        ):
            return answer.status

    assert run_async(status("GET", "/v1/models")) == 200
    assert run_async(status("PUT", CLAIM)) == 409


def test_a_wrong_key_claims_nothing(run):
    thief = run(key="guessed")
    with pytest.raises(EngineError, match="wrong or missing key"):
        run_async(thief.start())
    run_async(run().start())


def test_a_server_without_the_guard_is_warned_of(run, caplog):
    at, stop = serve(vllm)
    try:
        replica = run(at=at)
        run_async(replica.start())
        access = "lightning_rl.engines.replicas.server_access.ServerAccess"
        assert f"--middleware {access}" in caplog.text
        run_async(replica.close())
    finally:
        stop()
