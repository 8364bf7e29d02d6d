"""What processes do in tests/integration/test_ddp_resume.py whose checkpoints are folders.

Run as tests/support/ranks_run.py, with the name of a scenario: two processes begin a run, and any
number go on with its ``last``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ranks_resume import StopsWhenCollected, saved
from tests.support.ranks_run import failure, run_all, sharded


def scenarios(model: str, where: Path) -> dict[str, Callable[[], Any]]:
    def run(*extra: Any) -> dict[str, Any]:
        processes = int(os.environ["WORLD_SIZE"])
        strategy = sharded(True, processes)
        return saved(model, where, strategy, *extra, processes=processes, ckpt_path="last")

    return {
        "stopped": lambda: failure(lambda: run(StopsWhenCollected())),
        "rest": run,
    }


if __name__ == "__main__":
    run_all(scenarios)
