"""A slower way taken in place of a fast one is said once, by name and reason."""

import logging
from functools import cache

from lightning_rl.dist import rank

_log = logging.getLogger(__name__)


@cache
def fell_back(fast: str, reason: str, instead: str) -> None:
    """Warn, on rank 0 and the first time, that ``instead`` does what ``fast`` would do faster."""
    if rank() == 0:
        _log.warning("%s is not used: %s; %s is, which is slower", fast, reason, instead)
