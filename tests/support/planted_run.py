"""A run directory written by hand, with one rollout for each thing that can be wrong with one."""

import base64
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\"> 😀"
"""A text that a model may write to break a page."""

PLANTED = {
    "mask": {"loss_mask": [True, True, True, True], "versions": [3, -1, 3, 3]},
    "gap": {"trainer_logprobs": [-0.5, -0.25, -3.0, -0.125]},  # 2 nats at the third token
    "version": {"versions": [3, 3, 2, 3]},
    "number": {"advantages": [0.5, 0.5, float("nan"), 0.5]},
    "lengths": {"logprobs": [-0.5, -0.25, -1.0]},
    "reward": {"reward_parts": {"exact": 1.0, "style": float("nan")}},
    "failed": {
        "status": "failed",
        "reward": None,
        "error": "TimeoutError: the judge did not answer within 5 s",
    },
}
"""The change of a good rollout, by the flag that it must get."""

PLACES = {"mask": [1], "gap": [2], "version": [2], "number": [2]}
"""The tokens that the flags are about; the others are about the rollout."""


def good_rollout(more_rows: Sequence[dict[str, Any]] = (), **changes: Any) -> dict[str, Any]:
    """Return a completed rollout of four tokens, as RolloutRecorder writes it.

    ``changes`` are of the rollout, or of its row.
    """
    row: dict[str, Any] = {
        "prompt_ids": [5, 6],
        "token_ids": [7, 8, 9, 1],
        "loss_mask": [True, True, True, True],
        "logprobs": [-0.5, -0.25, -1.0, -0.125],
        "versions": [3, 3, 3, 3],
        "pieces": ["hel", "lo", " you", "<eos>"],
        "prompt_pieces": ["Say", " hello."],
        "trainer_logprobs": [-0.5, -0.25, -1.0, -0.125],
        "advantages": [0.5, 0.5, 0.5, 0.5],
    }
    row = {name: changes.pop(name, value) for name, value in row.items()}
    record: dict[str, Any] = {
        "iteration": 3,
        "id": "3/0/0/0",
        "prompt": {
            "id": "0",
            "prompt": "Say hello.",
            "token_ids": [5, 6],
            "columns": {"answer": "hello"},
        },
        "group_id": "3/0/0",
        "sample_index": 0,
        "seed": 1,
        "sampling": {"temperature": 1.0},
        "rows": [row, *more_rows],
        "completion": "hello you",
        "status": "completed",
        "finish_reason": "stop",
        "reward": 1.0,
        "reward_parts": {"exact": 1.0, "style": 0.5},
        "error": None,
    }
    return record | changes


def planted_rollouts() -> list[dict[str, Any]]:
    """Return forty good ones of five groups, rewards 0.00 to 0.39, a hostile one, planted ones."""
    good = [
        good_rollout(
            id=f"{i // 8}/0/{i}/0",
            group_id=f"{i // 8}/0/0",
            iteration=i // 8,
            reward=i / 100,
            completion=f"answer {i}",
            finish_reason="length" if i % 10 == 0 else "stop",
        )
        for i in range(40)
    ]
    hostile = good_rollout(
        id="hostile", iteration=5, completion=HOSTILE, pieces=[HOSTILE, "", "\n", "<eos>"]
    )
    planted = [
        good_rollout(id=flag, group_id="planted", iteration=6, **changes)
        for flag, changes in PLANTED.items()
    ]
    return [*good, hostile, *planted]


def write_run(directory: Path) -> Path:
    """Write ``metrics.jsonl`` (seven iterations, a loss not finite), rollouts and a summary."""
    directory.mkdir(parents=True)
    rows = [
        {
            "iteration": i,
            "reward/mean": i / 8,
            "policy/loss": float("nan") if i == 4 else 0.5 - i / 16,
            "time/generate": 0.5,
            "time/train": 0.25 + i / 4,
            "time/other": 0.25,
            "time/iteration": 1 + i / 4,
        }
        for i in range(1, 8)
    ]
    summary = {"status": "completed", "error": None, "accuracy_after": 0.875}
    for name, records in (("metrics.jsonl", rows), ("recorded.jsonl", planted_rollouts())):
        (directory / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def rollouts_of(page: str) -> list[dict[str, Any]]:
    """Return the rows of a page's list of rollouts."""
    runs = json.loads(blocks_of(page)["index"])["runs"]
    return [row for run in runs for block in run["blocks"] for row in block["rollouts"]]


def blocks_of(page: str) -> dict[str, bytes]:
    """Return the data blocks of a page, unpacked."""
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([^<]*)</script>', page)
    return {name: gzip.decompress(base64.b64decode(text)) for name, text in found}
