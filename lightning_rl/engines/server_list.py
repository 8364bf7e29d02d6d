"""Servers that come and go during a run: a list that is read again and again."""

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.replica import Replica
from lightning_rl.engines.supervision import Supervision
from lightning_rl.errors import ConfigError

_log = logging.getLogger(__name__)


class ServerList(ABC):
    """Says where servers run at present; give it to ``VLLMServer(urls=...)``.

    To write your own, override :meth:`read`: it may ask a cloud's API, or a scheduler.
    """

    @abstractmethod
    def read(self) -> list[str]:
        """Return the servers' URLs, like ``http://10.0.0.7:8000``. It runs in a thread; may block.

        Raises:
            ConfigError: if it does not find a list of URLs.
            OSError: if the list cannot be read; then the servers stay as they are.
        """


@configurable
class ServersInFile(ServerList):
    """A text file with a URL in each line; empty lines, and what follows a ``#``, do not count.

    Write it whole under another name and rename it, so that it is never read half written.

    Args:
        path: of the file, which the process that trains can read.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> list[str]:
        lines = Path(self.path).read_text("utf-8").splitlines()
        return [url for line in lines if (url := line.partition("#")[0].strip())]


@configurable
class ServersByName(ServerList):
    """All addresses that a host name stands for, as a headless service of Kubernetes has them.

    Args:
        url: like ``http://engines.default.svc:8000``; scheme and port are those of every server.

    Raises:
        ConfigError: if it is no such URL.
    """

    def __init__(self, url: str) -> None:
        require_url(url)
        self.url = url.rstrip("/")

    def read(self) -> list[str]:
        parts = urlsplit(self.url)
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        hosts = {str(address[0]) for *_, address in found}
        port = f":{parts.port}" if parts.port else ""
        return [
            f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}"
            for host in sorted(hosts)
        ]


def read_urls(servers: ServerList) -> list[str]:
    """What it says at present, each URL once.

    Raises:
        ConfigError: for what is no URL.
        OSError: if it could not find out.
    """
    urls = [url.rstrip("/") for url in servers.read()]
    for url in urls:
        require_url(url)
    return list(dict.fromkeys(urls))


async def follow(
    servers: ServerList,
    supervision: Supervision,
    replica_at: Callable[[str], Replica],
    every_s: float,
) -> None:
    """Let replicas join and leave as the list says, forever.

    Args:
        servers: the list.
        supervision: of the engine whose replicas they are.
        replica_at: makes the one at a URL.
        every_s: seconds between two looks.
    """
    said = ""
    while True:
        await asyncio.sleep(every_s)
        try:
            urls = await asyncio.to_thread(read_urls, servers)
        except (ConfigError, OSError) as error:
            if str(error) != said:
                _log.warning("servers stay as they are: %s", error)
            said = str(error)
            continue
        said = ""
        present = {replica.name: replica for replica in supervision.replicas}
        for url in urls:
            if url not in present:
                supervision.join(replica_at(url))
        for url, replica in present.items():
            if url not in urls:
                supervision.leave(replica)


def require_url(url: str) -> None:
    """Raise a ConfigError unless it is the address of a server, without a path."""
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        good = False
    if not good:
        raise ConfigError(
            f"urls: {url!r} is no http://host:port; write it like 'http://10.0.0.7:8000'"
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"urls: {url!r} must end before /v1: {url.rstrip('/')[:-3]!r}")
