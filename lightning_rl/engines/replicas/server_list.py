"""ServerList: servers that join and leave during a run, from a list that is read repeatedly."""

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.replicas.replica import Replica
from lightning_rl.engines.replicas.supervision import Supervision
from lightning_rl.errors import ConfigError

_log = logging.getLogger(__name__)


class ServerList(ABC):
    """Returns the URLs of the servers that currently run; pass it to ``VLLMServer(urls=...)``.

    To write your own, override :meth:`read`: it may ask a cloud's API, or a scheduler.
    """

    @abstractmethod
    def read(self) -> list[str]:
        """Return the servers' URLs, like ``http://10.0.0.7:8000``. It runs in a thread and may
        block.

        Raises:
            ConfigError: if it does not find a list of URLs.
            OSError: if the list cannot be read; then the servers stay as they are.
        """


@configurable
class ServersInFile(ServerList):
    """Reads a text file with one URL per line; empty lines and text after a ``#`` are ignored.

    Write it completely under another name and then rename it, so that it is never read half
    written.

    Args:
        path: path of the file, which the training process must be able to read.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> list[str]:
        lines = Path(self.path).read_text("utf-8").splitlines()
        return [url for line in lines if (url := line.partition("#")[0].strip())]


@configurable
class ServersByName(ServerList):
    """Resolves a host name to all of its addresses, as for a headless service of Kubernetes.

    Args:
        url: a URL like ``http://engines.default.svc:8000``, whose scheme and port apply to every
            server.

    Raises:
        ConfigError: if it is not such a URL.
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
    """Return the URLs that a list currently contains, each once.

    Raises:
        ConfigError: for an entry that is not a URL.
        OSError: if the list cannot be read.
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
    """Let replicas join and leave as the list changes, forever.

    Args:
        servers: the list.
        supervision: supervision of the engine whose replicas they are.
        replica_at: creates the replica at a URL.
        every_s: seconds between two reads of the list.
    """
    warned = ""
    while True:
        await asyncio.sleep(every_s)
        try:
            urls = await asyncio.to_thread(read_urls, servers)
        except (ConfigError, OSError) as error:
            if str(error) != warned:
                _log.warning("servers stay as they are: %s", error)
            warned = str(error)
            continue
        warned = ""
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
            f"urls: {url!r} must have the form http://host:port, like 'http://10.0.0.7:8000'"
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"urls: {url!r} must end before /v1: {url.rstrip('/')[:-3]!r}")
