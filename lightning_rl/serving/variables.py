"""The environment variables that programs get from the trainer, and the Python that runs them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

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
_PLACES = ("SSL_CERT_FILE", "HF_HOME", "HF_HUB_OFFLINE", "NLTK_DATA", "XDG_CACHE_HOME")
"""Variables that a hosted environment gets in addition: paths, and no keys."""
_LOOPBACK = "localhost,127.0.0.1,::1"
NO_PROXY = {"NO_PROXY": _LOOPBACK, "no_proxy": _LOOPBACK}
"""Lets clients reach endpoints on this machine without a proxy."""


def passed_on(names: Sequence[str]) -> dict[str, str]:
    """Return the trainer's variables among ``KEPT_VARIABLES`` and ``names``."""
    wanted = (*KEPT_VARIABLES, *names)
    return {name: os.environ[name] for name in wanted if name in os.environ}


def hosted_variables(env: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """Return all variables of a process that hosts another package's environment.

    Args:
        env: variables to set.
        pass_env: names of variables to pass on from the trainer's environment.
    """
    return passed_on([*_PLACES, *pass_env]) | NO_PROXY | dict(env)


def interpreter(python: str) -> str:
    """Return the path of an interpreter, which for a virtual environment's directory is its Python.

    Links are not followed: Python finds its environment by the path it was started with.
    """
    path = Path(python).expanduser()
    named = path.name.startswith("python") and not path.is_dir()
    return str((path if named else path / "bin" / "python").absolute())


def require_set(pass_env: Sequence[str]) -> None:
    """Refuse to pass on missing variables.

    Raises:
        ConfigError: if a variable is not set; names the first.
    """
    if missing := [name for name in pass_env if name not in os.environ]:
        raise ConfigError(
            f"pass_env names {missing[0]!r}, which is not set; export it, or leave it out"
        )
