"""Two training processes, started as torchrun does, and how their results compare with one's."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import forked
from tests.support.tolerances import rounding

ROOT = Path(__file__).parents[2]
SECONDS = 590
# Tokens are drawn by lot, so what is left is the order in which float32 numbers are added: by the
# tiny model, to logprobs of four nats or so.
TOLERANCE = rounding(additions=1_500, magnitude=4.0)

Results = Callable[[str], list[dict[str, Any]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells each of its processes."""
    return os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
    }  # fmt: skip


def run_two(module: str, model: Path, folder: Path, *only: str, ranks: int = 2) -> Results:
    """What each scenario of a module left, by rank; two processes run them all, or those named."""
    port = free_port()
    processes = [
        forked.started(
            module,
            [model, folder, *only],
            folder / f"output_{rank}",
            environment_of(rank, ranks, port),
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.join(SECONDS)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    outputs = [(folder / f"output_{rank}").read_text()[-3000:] for rank in range(ranks)]
    assert statuses == [0] * ranks, "\n\n".join(outputs)

    def of(scenario: str) -> list[dict[str, Any]]:
        files = [folder / f"{scenario}_{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]

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
