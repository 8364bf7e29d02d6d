"""Sends chat completions as fast as they are answered: the client of benchmarks.agent_server.

A process of its own, as an agent's program is. Reads one JSON object per line, ``{"port", "queues":
[[[key, body], ...], ...]}``: each queue has a connection, and sends its requests one after another.
Answers with ``{"seconds", "texts"}``: from the first byte sent to the last received.
"""

import asyncio
import json
import sys
import time


async def send(port: int, queue: list[tuple[str, str]]) -> list[str]:
    """Return the texts of the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    texts = []
    for key, body in queue:
        data = body.encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        told = await reader.readuntil(b"\r\n\r\n")
        length = int(told.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        texts.append(answer["choices"][0]["message"]["content"])
    writer.close()
    await writer.wait_closed()
    return texts


async def run(port: int, queues: list[list[tuple[str, str]]]) -> dict[str, object]:
    begin = time.perf_counter()
    texts = await asyncio.gather(*(send(port, queue) for queue in queues))
    return {"seconds": time.perf_counter() - begin, "texts": texts}


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(asyncio.run(run(job["port"], job["queues"]))), flush=True)


if __name__ == "__main__":
    main()
