"""What is required of the Python interpreter, told before something else fails without it."""

import locale
import sys

from lightning_rl.errors import ConfigError


def require_docstrings() -> None:
    """Require that Python keeps docstrings, which are read by transformers, and of tools.

    Raises:
        ConfigError: under ``-OO``.
    """
    if sys.flags.optimize > 1:
        raise ConfigError(
            "Python runs with -OO (PYTHONOPTIMIZE=2), which removes the docstrings that "
            "transformers and tools need; run it with -O, or without"
        )


def require_utf8() -> None:
    """Require that files are UTF-8 unless they say otherwise, also those that libraries read.

    Raises:
        ConfigError: naming the locale's encoding.
    """
    encoding = locale.getpreferredencoding(do_setlocale=False)
    if encoding.lower().replace("-", "") != "utf8":
        raise ConfigError(
            f"Python would read files in the locale's encoding, {encoding}, but configurations and "
            "data are UTF-8; set PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8"
        )
