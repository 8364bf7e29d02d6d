"""Provide a server over HTTP that answers everything alike, and counts its connections.

python -m tests.support.plain_server      prints its URL, and serves until it is killed
"""

import asyncio
import json
from contextlib import asynccontextmanager

CHOICE = {
    "token_ids": [7],
    "logprobs": {"content": [{"logprob": -1.0}]},
    "finish_reason": "stop",
    "weight_versions": [{"version": "0", "start": 0, "end": 1}],
    "message": {"content": "yes"},
}
ANSWER = json.dumps(
    {"choices": [CHOICE], "data": [{"max_model_len": 64}], "world_size": 1}
).encode()
HEAD = f"HTTP/1.1 200 OK\r\nContent-Length: {len(ANSWER)}\r\n\r\n".encode()


class Served:
    """A handler of connections.

    Args:
        most: requests that it answers on one connection; it closes it at the next, without a word.
    """

    def __init__(self, most: int = 2**30) -> None:
        self.most, self.open, self.at_once, self.total = most, 0, 0, 0

    async def __call__(self, reader, writer) -> None:
        self.open, self.total = self.open + 1, self.total + 1
        self.at_once = max(self.at_once, self.open)
        try:
            for _ in range(self.most):
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().lower().split("\r\n")
                length = [int(x.split(":")[1]) for x in lines if x.startswith("content-length:")]
                await reader.readexactly(length[0] if length else 0)
                await asyncio.sleep(0.005)
                writer.write(HEAD + ANSWER)
                await writer.drain()
            await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client closed it
        finally:
            self.open -= 1
            writer.close()

    @asynccontextmanager
    async def at(self):
        """Yield the server's URL."""
        server = await asyncio.start_server(self, "127.0.0.1", backlog=2000)
        async with server:
            host, port = server.sockets[0].getsockname()
            yield f"http://{host}:{port}"


async def main() -> None:
    async with Served().at() as url:
        print(url, flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
