"""Where threads and tasks are, to find out why a run does not progress."""

import asyncio
import faulthandler
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def name_crashes() -> None:
    """Have Python print its stack when native code crashes it; otherwise it ends silently."""
    if not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)  # in a notebook sys.stderr may be no file


Place = tuple[str, int, str]
"""File, line and function."""

_STANDARD = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parents[2])


def describe(loop: asyncio.AbstractEventLoop) -> str:
    """Return the stacks of all threads, then the awaits of the loop's tasks, equal ones counted."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    for chain, count in Counter(chains(loop)).most_common():
        parts.append(f"{count} tasks that await:\n" + "".join(f"  {tell(p)}\n" for p in chain))
    return "\n".join(parts)


def where_tasks_wait(loop: asyncio.AbstractEventLoop) -> str:
    """Return the place where most tasks of an event loop wait."""
    places = Counter(innermost(chain) for chain in chains(loop) if chain)
    return places.most_common(1)[0][0] if places else "no task (there is none)"


def where_thread_is(thread: threading.Thread) -> str:
    """Return the place that a thread has reached."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "the end of its thread"
    return innermost(_places(traceback.extract_stack(frame)))


def where_raised(stack: traceback.StackSummary) -> str | None:
    """Return the innermost place of a traceback in a user's code; None if it did not get there.

    Code that is installed counts only where there is no other.
    """
    others = [p for p in _places(stack) if not (_is_standard(p) or p[0].startswith(_OURS))]
    written = [place for place in others if "site-packages" not in place[0]] or others
    return tell(written[-1]) if written else None


def _places(stack: traceback.StackSummary) -> list[Place]:
    return [(frame.filename, frame.lineno or 0, frame.name) for frame in stack]


def innermost(stack: Sequence[Place]) -> str:
    """Return the innermost place outside the standard library, and where this package called it."""
    places = [place for place in stack if not _is_standard(place)] or list(stack)
    own = [place for place in places if "lightning_rl" in Path(place[0]).parts]
    reached = f" (called by {tell(own[-1])})" if own and own[-1] != places[-1] else ""
    return tell(places[-1]) + reached


def _is_standard(place: Place) -> bool:
    file = place[0]
    return file.startswith(("<frozen", _STANDARD)) and "site-packages" not in file


def chains(loop: asyncio.AbstractEventLoop) -> list[tuple[Place, ...]]:
    """Return the places of each task, from its own coroutine to the innermost one it awaits."""
    return [_chain(task.get_coro()) for task in asyncio.all_tasks(loop)]


def _chain(coroutine: Any) -> tuple[Place, ...]:
    places: list[Place] = []
    while coroutine is not None:
        # Of a coroutine, a generator or an asynchronous generator; else it is a future, the end.
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(coroutine, f"{k}_frame")), None)
        frame = kind and getattr(coroutine, f"{kind}_frame")
        if not frame:
            break
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        awaited = "gi_yieldfrom" if kind == "gi" else f"{kind}_await"
        coroutine = getattr(coroutine, awaited)
    return tuple(places)


def tell(place: Place) -> str:
    """Format a place as ``directory/file.py:12 in function``; our own files from the package on."""
    file, line, function = place
    path = Path(file)
    outside, _, own = path.as_posix().rpartition("/lightning_rl/")
    return f"{own if outside else '/'.join(path.parts[-2:])}:{line} in {function}"
