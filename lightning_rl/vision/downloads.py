"""Pictures of URLs that are downloaded while others are still on their way."""

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from itertools import cycle, islice
from typing import Any

from lightning_rl.run.threads import CallingThread
from lightning_rl.vision.fetching import fetched
from lightning_rl.vision.limits import PictureAccess, PictureLimits

AT_ONCE = 8
"""Downloads side by side; also how many are begun before anyone needs them."""


class Downloads:
    """Begins downloads before they are waited for; what goes wrong is told to who asks for it.

    Copies begin anew: they have no download under way.

    Args:
        limits: bounds of each.
        access: what a URL may lead to.
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
        """Begin what is needed now, and some of what will be; all others are given up."""
        wanted = dict.fromkeys([*now, *islice(later, AT_ONCE)])
        for url in self._coming.keys() - wanted.keys():
            self._coming.pop(url).cancel()
        for url in (url for url in wanted if url not in self._coming):
            self._coming[url] = next(self._threads).submit(partial(fetched, url, *self._given))

    def take(self, url: str) -> bytes:
        """What stands at an address; if that was not wanted, it is downloaded now.

        Raises:
            PictureError: if it cannot be had, or is beyond a bound.
        """
        coming = self._coming.get(url)
        return fetched(url, *self._given) if coming is None else coming.result()
