"""Lines on the terminal that nobody can act on, left out while the command runs (only there)."""

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
    # SFT's rows are in memory: worker processes would only cost.
    r"The '\w+_dataloader' does not have many workers",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Filter warnings, tips and progress bars of the libraries; real warnings stay."""
    # On CPUs there is no Triton, and nothing here needs it.
    triton = logging.getLogger("torch._library.triton")
    level = triton.level
    triton.setLevel(logging.ERROR)
    lightning = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    lightning.addFilter(_no_tips)
    from transformers.utils import logging as transformers_logging

    # "Loading weights" and "Writing model shards" bars, of a model that is there in a second.
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        for message in IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        try:
            yield
        finally:
            triton.setLevel(level)
            lightning.removeFilter(_no_tips)
            transformers_logging.enable_progress_bar()


def _no_tips(record: logging.LogRecord) -> bool:
    """Lightning's advertisements for its own services."""
    return "Tip: For seamless cloud" not in record.getMessage()
