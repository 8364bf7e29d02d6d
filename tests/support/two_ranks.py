"""Compare the results of several processes with those of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tolerances import rounding

ROOT = Path(__file__).parents[2]
EXPORTED = Path("lightning_logs", "version_0", "hf", "model.safetensors")
# Tokens are drawn by lot, so what is left is the order in which float32 numbers are added: by the
# tiny model, to logprobs of four nats or so.
TOLERANCE = rounding(additions=1_500, magnitude=4.0)


def checkpoint_of(run: dict[str, Any], name: str) -> Path:
    return run["where"] / "lightning_logs" / "version_0" / "checkpoints" / name


def require_same_rollouts(one: list[list[Any]], several: list[list[list[Any]]]) -> None:
    """Require that all processes together had the rollouts of one, batch by batch."""
    shares = zip(*several, strict=True)
    batches = [sorted(rollout for share in batch for rollout in share) for batch in shares]
    assert batches == [sorted(batch) for batch in one]


def require_same_rows(
    one: list[dict[str, float]], several: list[dict[str, float]], tolerance: float = TOLERANCE
) -> None:
    """Require the same metrics, but for those of experts, whose micro-batches depend on the
    processes."""
    for theirs, ours in zip(one, several, strict=True):
        expected, found = (
            {name: value for name, value in comparable(row).items() if "experts/" not in name}
            for row in (theirs, ours)
        )
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


def require_same_run(one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    """Require the same start, rollouts and metrics, of a policy that moved."""
    require_same_rollouts(one["rollouts"], [rank["rollouts"] for rank in several])
    assert several[0]["start"] == pytest.approx(one["start"], rel=TOLERANCE)
    require_same_rows(one["rows"], several[0]["rows"])
    assert one["rows"][-1]["policy/kl_old"] > 1e-4


def require_same_export(one: dict[str, Any], several: dict[str, Any]) -> None:
    """Require that the runs have exported the same weights, but for rounding."""
    exported, whole = (load_file(run["where"] / EXPORTED) for run in (several, one))
    assert exported.keys() == whole.keys()
    for key, weight in whole.items():
        torch.testing.assert_close(exported[key], weight, rtol=TOLERANCE, atol=TOLERANCE)


def comparable(row: dict[str, float]) -> dict[str, float]:
    """Return a row without what depends on time, or is itself an error of rounding."""
    timed = ("time/", "sync/seconds", "rollout/tokens_per_s")
    noise = ("sync/probe_gap", "rollout/logprob_gap")
    kept = (name for name in row if not _unnamed(name).startswith(timed + noise))
    return {name: row[name] for name in kept}


def _unnamed(metric: str) -> str:
    """Return the metric without the name of a policy that may be in it."""
    first, *_, last = metric.split("/")
    return f"{first}/{last}"
