"""Skip tests that need bubblewrap where it is not installed; fail them where CI lacks it."""

import os

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.sandbox import sandboxed


def need_sandbox() -> None:
    """Skip the test with the machine's reason; with CI set, that is an error."""
    try:
        sandboxed([])
    except ConfigError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
