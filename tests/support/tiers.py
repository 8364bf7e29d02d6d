"""Cases that one tier runs and the other does not."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of a parametrised test that runs in ``make test-all`` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)
