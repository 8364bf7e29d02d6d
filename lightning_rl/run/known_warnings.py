"""Lightning's warnings and messages that our modules cause, and that users cannot act on."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

IGNORED_WARNINGS = (
    # Lightning calls what torch deprecated; fixed by neither of us here.
    r".*isinstance\(treespec, LeafSpec\)` is deprecated",
    # During fit there is no validation loader: the Evaluate callback evaluates.
    r"Total length of `list` across ranks is zero",
    # We log each iteration ourselves; the Trainer's interval concerns self.log only.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # We do pass sync_dist; Lightning drops it on one device, then sees vLLM's process group.
    r"It is recommended to use `self.log\('eval/",
    # Supervised modules count optimizer steps there, which is what they want.
    r"When using `Trainer\(accumulate_grad_batches != 1\)` and overriding",
    # SFT's rows are in memory: worker processes would only cost.
    r"The '\w+_dataloader' does not have many workers",
)


def ignore_known_warnings() -> None:
    """Ignore these warnings from Lightning until filters are reset; others stay."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message, module=r"lightning\.(pytorch|fabric)\.")


@contextmanager
def without_info() -> Iterator[None]:
    """Within the block, silence Lightning's messages on Trainers that the user did not make."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
