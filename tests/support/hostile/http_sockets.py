"""Hostile connections: what is sent before and in place of a request, and with which key."""

import asyncio
import json

from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.serving import RequestLimits
from tests.support.hostile.call import Call
from tests.support.hostile.http_desk import CHAT, CLAUDE, GOOD, Desk, Said, http_call

SOON = RequestLimits(max_wait_s=1.0)
BODY = json.dumps(GOOD).encode()


def sent(text: bytes) -> Said:
    """Send these bytes, with nothing of the session's."""

    async def say(desk: Desk) -> str:
        return await desk.send(text)

    return say


def asked(body: bytes = BODY, path: str = CHAT, method: str = "POST", **headers: str) -> Said:
    """Send a request with the session's key, unless the headers have another."""

    async def say(desk: Desk) -> str:
        given = {"content_length": str(len(body))} | headers
        return await desk.send(desk.head(path, method, **given) + body)

    return say


async def trickle(desk: Desk) -> str:
    """Send a header every tenth of a second, without end."""
    host, port = desk.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    reading = asyncio.create_task(reader.read())
    writer.write(b"POST / HTTP/1.1\r\n")
    while not reading.done():
        writer.write(b"x-a: b\r\n")
        await asyncio.sleep(0.1)
    writer.close()
    return (await reading).decode().partition(" ")[2]


async def hundreds(desk: Desk) -> str:
    """Open so many connections that say nothing."""
    return (await asyncio.gather(*(desk.send(b"") for _ in range(300))))[0]


async def gone(desk: Desk) -> str:
    """Leave in the middle of a request, at every tenth byte."""
    host, port = desk.server.url.removeprefix("http://").split(":")
    whole = desk.head(content_length=str(len(BODY))) + BODY
    for end in range(1, len(whole), 10):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole[:end])
        await writer.drain()
        writer.transport.abort()
    return "200 all have gone"


async def over(desk: Desk) -> str:
    """Use the key of another rollout's session, which has ended."""
    engine, sampling = desk.session.engine, desk.session.terms.sampling
    rollout = Rollout(Prompt("other", "?", [5]), "g", 1, seed=2)
    async with desk.server.session(rollout, engine, sampling) as session:
        key = session.api_key
    return await desk.post(GOOD, authorization=f"Bearer {key}")


async def reused(desk: Desk) -> str:
    """Use a key that was another request's."""
    first = await desk.post(GOOD, idempotency_key="k")
    assert first.startswith("200"), first
    return await desk.post({**GOOD, "n": 2}, idempotency_key="k")


async def reused_elsewhere(desk: Desk) -> str:
    """Use the key for another API."""
    await desk.post(GOOD, idempotency_key="k")
    return await desk.post({**GOOD, "model": "policy"}, CLAUDE, idempotency_key="k")


async def reused_streaming(desk: Desk) -> str:
    """Use the key for a streamed answer."""
    await desk.post(GOOD, idempotency_key="k")
    return await desk.post({**GOOD, "stream": True}, idempotency_key="k")


async def again(desk: Desk) -> str:
    """Repeat a request with its key, which gets the same answer, asked for once."""
    one, two = [await desk.post(GOOD, idempotency_key="k" * 5000) for _ in range(2)]
    choices = [json.loads(said.partition(" ")[2])["choices"] for said in (one, two)]
    assert choices[0] == choices[1]
    assert len(desk.session.episode.rollout.calls) == 1
    return two


TIMEOUT = "408", "limits.max_wait_s"
CALLS: list[Call] = [
    http_call("a connection that says nothing", sent(b""), *TIMEOUT, limits=SOON),
    http_call("300 connections that say nothing", hundreds, *TIMEOUT, limits=SOON),
    http_call("headers that never end", sent(b"GET / HTTP/1.1\r\nx-a: "), *TIMEOUT, limits=SOON),
    http_call("headers that trickle", trickle, *TIMEOUT, limits=SOON),
    http_call("a body that never comes", asked(b"", content_length="9"), *TIMEOUT, limits=SOON),
    http_call(
        "chunks that never end",
        sent(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab"),
        *TIMEOUT,
        limits=SOON,
    ),
    http_call("clients that go away", gone, "200", right=True),
    http_call("a megabyte of headers", sent(b"GET / HTTP/1.1\r\nx: " + b"y" * 2**20), "431"),
    http_call("no HTTP", sent(b"\x16\x03\x01\x02\x00" * 20), "400", "Invalid HTTP request"),
    http_call("HTTP/2", sent(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "400", "Invalid HTTP request"),
    http_call("a length of -1", asked(content_length="-1"), "400", "Invalid HTTP request"),
    http_call("a length of 400 digits", asked(content_length="9" * 400), "400", "Invalid"),
    http_call(
        "a chunk of no size",
        sent(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"),
        *("400", "Invalid HTTP request"),
    ),
    http_call("a path that is no text", asked(path="/v1/\xff\xfe"), "400", "Invalid HTTP request"),
    http_call("a path in half a pair", asked(path="/v1/%ed%a0%80"), "404", "unknown_url"),
    http_call("an unknown path", asked(path="/v1/" + "x" * 9000), "404", "unknown_url"),
    http_call("GET where POST belongs", asked(method="GET"), "404", "unknown_url"),
    http_call("no key", asked(authorization=""), "401", "Incorrect API key"),
    http_call("a wrong key", asked(authorization="Bearer sk-1"), "401", "Incorrect API key"),
    http_call("a key of 60,000 bytes", asked(authorization="B " + "k" * 60_000), "401"),
    http_call("a key that is no text", asked(authorization="Bearer \xff\xfe"), "401"),
    http_call(
        "9 megabytes without a key", asked(b"x" * 9 * 2**20, authorization=""), "401", "Incorrect"
    ),
    http_call("the key of a rollout that is over", over, "503", "session_over"),
    http_call("a retry count that is none", asked(x_stainless_retry_count="x"), "200", right=True),
    http_call("a session's name of 9,000 bytes", asked(x_session_id="s" * 9000), "200", right=True),
    http_call("an idempotency key with another n", reused, "400", "another request before"),
    http_call("an idempotency key with another API", reused_elsewhere, "400", "another request"),
    http_call("an idempotency key, and a stream", reused_streaming, "400", "another request"),
    http_call("the same twice by its key", again, "200", right=True),
]
