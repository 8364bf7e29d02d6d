"""Two training processes, started as torchrun does, and how their results compare with one's."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import forked
from lightning_rl.engines.server_process import free_port
from tests.support.tolerances import rounding

ROOT = Path(__file__).parents[2]
SECONDS = 590
EXPORTED = Path("lightning_logs", "version_0", "hf", "model.safetensors")
# Tokens are drawn by lot, so what is left is the order in which float32 numbers are added: by the
# tiny model, to logprobs of four nats or so.
TOLERANCE = rounding(additions=1_500, magnitude=4.0)

Results = Callable[[str], list[dict[str, Any]]]


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


def by_processes(scenarios: Iterable[str]) -> dict[str, list[str]]:
    """Scenarios of four processes, of two that go on ``from_four``'s, or of two."""
    found: dict[str, list[str]] = {"two": [], "four": [], "from_four": []}
    for name in scenarios:
        kind = "four" if name.startswith("four_") else "two"
        found["from_four" if name.endswith("_from_four") else kind].append(name)
    return found


def require_same_rollouts(one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    """All processes together had those of one, batch by batch."""
    shares = zip(*(rank["rollouts"] for rank in several), strict=True)
    batches = [sorted(rollout for share in batch for rollout in share) for batch in shares]
    assert batches == [sorted(map(list, batch)) for batch in one["rollouts"]]


def require_same_export(one: Path, several: Path) -> None:
    """Runs in these folders have exported the same weights, but for rounding."""
    exported, whole = (load_file(folder / EXPORTED) for folder in (several, one))
    assert exported.keys() == whole.keys()
    for key, weight in whole.items():
        torch.testing.assert_close(exported[key], weight, rtol=TOLERANCE, atol=TOLERANCE)


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
