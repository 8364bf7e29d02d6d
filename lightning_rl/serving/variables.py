"""The environment variables that programs get from the trainer."""

import os
from collections.abc import Sequence

from lightning_rl.errors import ConfigError

KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
)
"""Variables that programs get from the trainer's environment: none of them is a secret."""
_LOOPBACK = "localhost,127.0.0.1,::1"
NO_PROXY = {"NO_PROXY": _LOOPBACK, "no_proxy": _LOOPBACK}
"""Lets clients reach endpoints on this machine without a proxy."""


def passed_on(names: Sequence[str]) -> dict[str, str]:
    """Return the trainer's variables among ``KEPT_VARIABLES`` and ``names``."""
    wanted = (*KEPT_VARIABLES, *names)
    return {name: os.environ[name] for name in wanted if name in os.environ}


def require_set(pass_env: Sequence[str]) -> None:
    """Refuse to pass on missing variables.

    Raises:
        ConfigError: if a variable is not set; names the first.
    """
    if missing := [name for name in pass_env if name not in os.environ]:
        raise ConfigError(
            f"pass_env names {missing[0]!r}, which is not set; export it, or leave it out"
        )
