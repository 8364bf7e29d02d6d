"""Failures of a hub or a file to deliver a dataset: retried, or explained in one line."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard, TypeVar

from lightning_rl.errors import DataError, first_line

T = TypeVar("T")
_TRIES = 4
_LONGEST_WAIT = 60.0
"""Maximum seconds before another try; if the hub asks for a longer wait, the error is raised."""
_BUSY = (408, 429, 500, 502, 503, 504)


def patiently(ask: Callable[[], T]) -> T:
    """Retry a few times if the hub is unavailable, which its clients do only partly."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    for tried in range(1, _TRIES):
        try:
            return ask()
        except Exception as error:
            chain = list(_chain(error))
            wait = _retry_after(chain) or 0.5 * 2**tried
            if (
                not (_status(chain) in _BUSY or _broken(chain))
                or any(
                    isinstance(one, LocalEntryNotFoundError) for one in chain
                )  # it did ask again
                or wait > _LONGEST_WAIT
            ):
                raise
            time.sleep(wait)
    return ask()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(chain: list[BaseException]) -> int | None:
    found = (getattr(getattr(one, "response", None), "status_code", None) for one in chain)
    return next((status for status in found if status is not None), None)


def _retry_after(chain: list[BaseException]) -> float | None:
    for one in chain:
        told = getattr(getattr(one, "response", None), "headers", {}).get("Retry-After", "")
        if told.isdigit():
            return float(told)
    return None


def _broken(chain: list[BaseException]) -> bool:
    """Return True if a connection failed; the clients use two generations of one library."""
    return any(
        isinstance(one, ConnectionError | TimeoutError)
        or (type(one).__module__.startswith("httpx") and not hasattr(one, "response"))
        for one in chain
    )


def explained(
    error: Exception,
    path: str,
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> DataError:
    """Return an error that says what went wrong, and how to fix it."""
    import datasets
    from huggingface_hub import constants

    chain = list(_chain(error))
    text, status = "\n".join(map(str, chain)), _status(chain)
    url = f"{constants.ENDPOINT}/datasets/{path}"
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    if (refused := next((one for one in chain if _concerns(one, cache)), None)) is not None:
        return DataError(
            f"{path}: the cache of datasets, {cache}, cannot be written ({refused.strerror}); set "
            "HF_HOME or HF_DATASETS_CACHE to a directory that can"
        )
    if "OfflineModeIsEnabled" in text:
        return DataError(
            f"{path!r} is not in the cache ({constants.HF_HOME}), and HF_HUB_OFFLINE is set; load "
            "it once without HF_HUB_OFFLINE, or name a folder or file"
        )
    if "gated dataset" in text or status in (401, 403):
        token = "the token in HF_TOKEN has no access" if _has_token() else "HF_TOKEN is not set"
        return DataError(
            f"{path!r} is gated, and {token}; accept its terms at {url}, and set HF_TOKEN to a "
            "token of that account"
        )
    if "Revision" in text and "doesn't exist" in text:
        return DataError(
            f"{path!r} has no revision={revision!r}; name a branch, tag or commit that it has"
        )
    if "doesn't exist on the Hub" in text:
        return DataError(
            f"{path!r} is neither a dataset of the hub ({constants.ENDPOINT}) nor a folder or "
            f"file here ({Path.cwd()}); correct the name or, if it is private, set HF_TOKEN"
        )
    if found := re.search(r"(?:not found\. Available|available configs): (\[.*\])", text):
        return DataError(f"{path}: name={name!r} is not one of {found[1]}; set name")
    if found := re.search(r"Bad split: .*\. Available splits: (\[.*\])", text):
        return DataError(f"{path}: split={split!r} is not one of {found[1]}; set split")
    if status == 429:
        wait = _retry_after(chain)
        when = "later" if wait is None else f"in {wait:.0f} s"
        more = "" if _has_token() else ", or set HF_TOKEN for a higher rate limit"
        return DataError(
            f"{path!r}: the hub ({constants.ENDPOINT}) limits the request rate (status 429), "
            f"even after {_TRIES} tries; try again {when}{more}"
        )
    if status in _BUSY or _broken(chain):
        what = (
            f"answers with status {status}"
            if status
            else f"breaks off: {first_line(_root_of(error))}"
        )
        return DataError(
            f"{path!r}: the hub ({constants.ENDPOINT}) {what}, even after {_TRIES} tries; check "
            "the network and HF_ENDPOINT, and start again: what was downloaded is kept"
        )
    if Path(path).is_dir() and "data file" in text:
        return DataError(
            f"{path}: not a folder that save_to_disk wrote, nor one of Parquet, JSON lines, CSV or "
            "Arrow files; correct path"
        )
    return DataError(f"{path}: cannot be read: {first_line(_root_of(error))}")


def _concerns(error: BaseException, cache: Path) -> TypeGuard[OSError]:
    """Tell whether a file of the cache, or a folder on the way to it, was refused."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return False
    there = Path(error.filename)
    return there.is_relative_to(cache) or cache.is_relative_to(there)


def _root_of(error: BaseException) -> BaseException:
    """Return the root cause of an error."""
    while error.__cause__ is not None and str(error.__cause__):
        error = error.__cause__
    return error


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
