"""Name what only newer versions can do of those that setup.cfg admits."""

import pytest
import transformers
from packaging.version import Version


def need_transformers(version: str, what: str) -> None:
    """Skip the test with an older one, where ``what`` is refused by name."""
    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"transformers {transformers.__version__}: {what} from {version} on")
