"""Mark cases that one of the Makefile's commands runs and another does not."""

import os
from typing import Any

import pytest

from tests.disturbed import VARIABLE

follows_memory = pytest.mark.skipif(
    VARIABLE in os.environ, reason="disturbed kernels allocate memory of their own"
)
"""Marks a test that counts the bytes of every allocation; ``make test-rounding`` skips it."""


def slow(*values: Any) -> Any:
    """Return a case of a parametrised test that runs in ``make test-all`` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)
