"""Calling what may block or hang from the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_daemon_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call in a daemon thread: unlike a pool's, one that hangs delays neither others nor exit.

    Raises:
        RuntimeError: instead of what would end the process, such as SystemExit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = function(**arguments)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True).start()
    result, error = await done
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"it raised {type(error).__name__}: {error}")
    return result
