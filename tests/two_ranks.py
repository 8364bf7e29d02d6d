"""Two training processes, started as torchrun does, and how their results compare with one's."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import forked
from tests.tolerances import rounding

ROOT = Path(__file__).parents[1]
SECONDS = 590
# Tokens are drawn by lot, so what is left is the order in which float32 numbers are added: by the
# tiny model, to logprobs of four nats or so.
TOLERANCE = rounding(additions=1_500, magnitude=4.0)

Results = Callable[[str], list[dict[str, Any]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_two(module: str, model: Path, folder: Path) -> Results:
    """What each scenario of a module left, by rank; two processes run them all."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    processes = [
        forked.started(
            module,
            [model, folder],
            folder / f"output_{rank}",
            environment | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    try:
        for process in processes:
            process.join(SECONDS)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    outputs = [(folder / f"output_{rank}").read_text()[-3000:] for rank in range(2)]
    assert statuses == [0, 0], "\n\n".join(outputs)

    def of(scenario: str) -> list[dict[str, Any]]:
        return [json.loads((folder / f"{scenario}_{rank}.json").read_text()) for rank in range(2)]

    return of


def comparable(row: dict[str, float]) -> dict[str, float]:
    """Without what depends on time, or is itself an error of rounding."""
    timed = ("time/", "sync/seconds", "rollout/tokens_per_s")
    noise = ("sync/probe_gap", "rollout/logprob_gap")
    kept = (name for name in row if not _unnamed(name).startswith(timed + noise))
    return {name: row[name] for name in kept}


def _unnamed(metric: str) -> str:
    """Without the name of a policy that may be in it."""
    first, *_, last = metric.split("/")
    return f"{first}/{last}"
