"""Downloads by HTTP within limits of size and time; strangers' URLs reach only public hosts."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urljoin, urlsplit, urlunsplit

from lightning_rl.config.schema import one_line
from lightning_rl.errors import PictureError
from lightning_rl.run.retry import ServerError, retry
from lightning_rl.vision.limits import PictureAccess, PictureLimits

_MOST_REDIRECTS = 5
_REDIRECTS = {301, 302, 303, 307, 308}
_NAT64 = ip_network("64:ff9b::/96")
_WANTS_KEY = {401, 403, 407}
_MAY_PASS = {408, 425, 429}


def fetched(url: str, limits: PictureLimits, access: PictureAccess) -> bytes:
    """Download the file at an http(s) URL.

    Raises:
        PictureError: if it cannot be downloaded, or exceeds ``limits``.
    """
    # In a thread of its own: the caller's may be running an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _within_time(url, limits, access)).result()


async def _within_time(url: str, limits: PictureLimits, access: PictureAccess) -> bytes:
    try:
        async with asyncio.timeout(limits.timeout_s):
            call = partial(_followed, url, limits, access)
            return await retry(call, limits.retries, on=(ServerError,))
    except ServerError as error:
        raise PictureError(str(error)) from error
    except TimeoutError as error:
        raise PictureError(
            f"{shown_url(url)} did not arrive within timeout_s={limits.timeout_s:g}; raise it, or "
            "download the picture and name its file"
        ) from error


async def _followed(url: str, limits: PictureLimits, access: PictureAccess) -> bytes:
    """Follow redirects here, to check each: it may lead to a host that the URL may not name."""
    target = url
    for _ in range(_MOST_REDIRECTS + 1):
        result = await _asked(target, limits, access)
        if isinstance(result, bytes):
            return result
        target = urljoin(target, result)
    raise PictureError(
        f"{shown_url(url)} redirects more than {_MOST_REDIRECTS} times; name the final address"
    )


async def _asked(url: str, limits: PictureLimits, access: PictureAccess) -> bytes | str:
    """Return the file at one address, or the address that it redirects to.

    Raises:
        PictureError: if retrying would not help.
        ServerError: if it may.
    """
    import aiohttp

    name, host = shown_url(url), _host(url)
    free = access.private_hosts or host in access.hosts
    no_limit = aiohttp.ClientTimeout(total=None)  # who asks has one
    try:
        connector = aiohttp.TCPConnector(socket_factory=None if free else partial(_public, host))
        async with (
            aiohttp.ClientSession(
                connector=connector, trust_env=access.private_hosts, timeout=no_limit
            ) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            if answer.status in _REDIRECTS and (to := answer.headers.get("Location")):
                return to
            if answer.status != 200:
                passes = answer.status >= 500 or answer.status in _MAY_PASS
                kind = ServerError if passes else PictureError
                raise kind(_refused(name, answer.status, answer.reason))
            if (answer.content_length or 0) > limits.max_bytes:
                raise too_many_bytes(name, f"{answer.content_length:,}", limits)
            body = bytearray()
            async for chunk in answer.content.iter_chunked(2**16):
                body += chunk
                if len(body) > limits.max_bytes:  # with no length told, or a false one
                    raise too_many_bytes(name, f"more than {limits.max_bytes:,}", limits)
            return bytes(body)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error, PictureError):
            raise
        why = one_line(error) or type(error).__name__
        forever = isinstance(error, aiohttp.ClientSSLError | aiohttp.InvalidURL)
        kind = PictureError if forever else ServerError
        raise kind(
            f"{name} cannot be downloaded: {why}; correct the address, or download the picture and "
            "name its file"
        ) from error


def _host(url: str) -> str:
    """Return the host of a URL.

    Raises:
        PictureError: if it is not an http(s) URL.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts.hostname
    except ValueError:  # a port that is no number, or a broken IPv6 address
        pass
    raise PictureError(
        f"{one_line(url, 80)!r} must begin with http:// or https:// and name a host; correct it"
    )


def _refused(name: str, status: int, reason: str | None) -> str:
    why = f"{name} answered {status} {one_line(reason or '', 40)}".rstrip()
    if status in _WANTS_KEY:
        return f"{why}: it requires a key, and none is sent; download the picture and name its file"
    return f"{why}; correct the address, or download the picture and name its file"


def _public(host: str, found: tuple) -> socket.socket:
    """Make a socket to a resolved address, if it belongs to the public internet.

    This checks the very address that is connected to: a name may resolve differently each time.

    Raises:
        PictureError: if the address is not public.
    """
    family, kind, protocol, _, address = found
    if not is_public(address[0]):
        raise PictureError(
            f"{host} is {address[0]}, which is not a public internet address; send the picture "
            "itself as a data: URI, or allow the host"
        )
    return socket.socket(family, kind, protocol)


def is_public(address: str) -> bool:
    """Tell whether an IP address, or an IPv4 address that it embeds, is on the public internet."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        inner: IPv4Address | None = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast


def shown_url(url: str) -> str:
    """Return a URL for messages, without password and query, which may hold a key."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return one_line(urlunsplit((parts.scheme, host, parts.path, "", "")), 120)
    except ValueError:
        return one_line(url, 60)


def too_many_bytes(name: str, size: str, limits: PictureLimits) -> PictureError:
    """Return the error for a picture whose file is too large."""
    return PictureError(
        f"{name} has {size} bytes, more than max_bytes={limits.max_bytes:,}; shrink the picture, "
        "or raise it"
    )
