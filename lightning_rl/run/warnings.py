"""Warnings that only one process of a run prints, without Lightning."""

import os
import warnings

from lightning_rl.run.processes.dist import rank, world_size

_LAUNCHERS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Variables by which launchers number the processes that they start."""


def rank_zero_warn(message: str) -> None:
    """Warn on the first rank; before ranks are connected, on the process that is launched first."""
    launched = next((os.environ[name] for name in _LAUNCHERS if name in os.environ), "0")
    if rank() == 0 and (world_size() > 1 or launched == "0"):
        warnings.warn(message, UserWarning, stacklevel=3)
