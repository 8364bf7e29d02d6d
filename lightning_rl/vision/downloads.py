"""Concurrent downloads of pictures from URLs, begun before they are needed."""

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from itertools import cycle, islice
from typing import Any

from lightning_rl.run.loop.threads import CallingThread
from lightning_rl.vision.fetching import fetched
from lightning_rl.vision.limits import PictureAccess, PictureLimits

AT_ONCE = 8
"""Number of concurrent downloads; also how many are begun before they are needed."""


class Downloads:
    """Begins downloads before they are needed; :meth:`take` raises their errors.

    Copies start without any download under way.

    Args:
        limits: limits of each picture.
        access: the hosts that URLs may reach.
    """

    def __init__(self, limits: PictureLimits, access: PictureAccess) -> None:
        self._given = limits, access
        self._threads = cycle([CallingThread("pictures") for _ in range(AT_ONCE)])
        self._coming: dict[str, Future[bytes]] = {}

    def __deepcopy__(self, memo: Any) -> "Downloads":
        return Downloads(*self._given)

    def __reduce__(self) -> Any:
        return Downloads, self._given

    def want(self, now: Iterable[str], later: Iterable[str]) -> None:
        """Begin the downloads needed now, and up to ``AT_ONCE`` later ones; cancel all others."""
        wanted = dict.fromkeys([*now, *islice(later, AT_ONCE)])
        for url in self._coming.keys() - wanted.keys():
            self._coming.pop(url).cancel()
        for url in (url for url in wanted if url not in self._coming):
            self._coming[url] = next(self._threads).submit(partial(fetched, url, *self._given))

    def take(self, url: str) -> bytes:
        """Return the file at a URL; download it now unless :meth:`want` named it.

        Raises:
            PictureError: if it cannot be downloaded, or exceeds a limit.
        """
        coming = self._coming.get(url)
        return fetched(url, *self._given) if coming is None else coming.result()
