"""Waiting for a remote service: how long, and how often to try."""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lightning_rl.errors import LightningRLError
from lightning_rl.run.warnings import rank_zero_warn

T = TypeVar("T")

LONGEST_ASKED_S = 600.0
"""Longest wait in seconds that a server may ask for; if it asks for more, the error is raised."""
_WORTH_A_WORD_S = 30.0
"""Longer waits are reported, since the run would look as if it hung."""
_NO_FILE_WAIT_S = 0.05, 0.25
"""Bounds of the wait before another attempt to open a connection."""


class ServerError(LightningRLError):
    """A server did not answer as expected; another attempt after ``wait_s`` seconds may help."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


# Of its own: waiting must not move the random numbers that the run is reproduced from.
_jitter = random.Random()


async def retry(
    call: Callable[[], Awaitable[T]],
    retries: int = 3,
    timeout_s: float | None = None,
    first_wait_s: float = 0.5,
    longest_wait_s: float = 30.0,
    on: tuple[type[Exception], ...] = (Exception,),
) -> T:
    """Await ``call()``, and again after an error, with a wait that doubles each time.

    The i-th wait (from 0) is between half and all of ``min(first_wait_s * 2**i, longest_wait_s)``,
    so that many clients that failed together do not come back together. If a :class:`ServerError`
    asks for a longer wait, that is used, up to ``LONGEST_ASKED_S``; if it asks for more, it is
    raised at once.

    Args:
        call: makes a new attempt.
        retries: attempts after the first.
        timeout_s: seconds per attempt; None: no limit.
        first_wait_s: longest wait in seconds before the first retry.
        longest_wait_s: longest wait in seconds before any retry.
        on: errors after which to try again; others are raised at once. A timeout always counts.

    Raises:
        TimeoutError: if the last attempt took longer than ``timeout_s``.
        Exception: whatever else the last attempt raised.
    """
    expected: tuple[type[Exception], ...] = (TimeoutError, *on)
    for attempt in range(retries):
        try:
            return await _within(timeout_s, call)
        except expected as error:
            asked = error.wait_s if isinstance(error, ServerError) else 0.0
            if asked > LONGEST_ASKED_S:
                raise
            if asked > _WORTH_A_WORD_S:
                rank_zero_warn(f"waiting {asked:g} s, as the server asks: {error}")
            wait = min(first_wait_s * 2**attempt, longest_wait_s) * _jitter.uniform(0.5, 1.0)
            await asyncio.sleep(max(wait, asked))
    return await _within(timeout_s, call)


class WaitsForFile:
    """Makes calls again that failed since no file can be opened; the caller has a time limit.

    Each connection is an open file. That this process (EMFILE) or this machine (ENFILE) has too
    many says nothing of the server. ``waiting`` is True if the last attempt failed for this.
    """

    waiting = False

    async def for_call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await ``call()``, and again as long as no file can be opened."""
        while True:
            try:
                answer = await call()
            except Exception as error:
                if not lacks_files(error):
                    self.waiting = False
                    raise
            else:
                return answer
            if not self.waiting:
                self.waiting = True
                rank_zero_warn(
                    "no connection can be opened, since this process or machine has too many open "
                    "files; waiting. Raise the limit (ulimit -n), or have fewer rollouts in flight"
                )
            await asyncio.sleep(_jitter.uniform(*_NO_FILE_WAIT_S))


def lacks_files(error: BaseException | None) -> bool:
    """Return True if an error was caused by too many open files."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return True
        error = getattr(error, "os_error", None) or error.__cause__ or error.__context__
    return False


async def _within(timeout_s: float | None, call: Callable[[], Awaitable[T]]) -> T:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await call()
    except TimeoutError as error:
        if limit.expired():  # else it is the call's own, which says more
            raise TimeoutError(f"no answer within timeout_s={timeout_s}") from error
        raise
