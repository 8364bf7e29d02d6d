"""The Chromium that `make browser` installs, or another one."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """Return what ``CHROMIUM`` names; else what ``make browser`` installed or is on the path."""
    installed = ROOT / "build" / "browser" / "chromium"
    given = os.environ.get("CHROMIUM") or (str(installed) if installed.exists() else None)
    return given or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched(path: str) -> Iterator[Any]:
    """Lend playwright's browser of an executable to the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Provide a browser for the tests of a file, which are skipped without one."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: run `make browser`, or set CHROMIUM to one")
    with launched(path) as chromium:
        yield chromium


def wait_until(page: Any, expression: str, seconds: float = 60) -> None:
    """Wait until a JavaScript expression is true.

    Unlike playwright's ``wait_for_function``, it needs no ``eval`` in the page, which the page's
    policy forbids.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not true after {seconds} s: {expression}"
        page.wait_for_timeout(20)
