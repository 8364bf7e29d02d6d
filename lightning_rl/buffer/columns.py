"""A rollout as a row: columns to search by, four token arrays, and the rest as JSON."""

import json
from typing import Any

from lightning_rl.buffer.base import as_record, as_rollout
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout

ARRAYS = {"token_ids": "<i4", "loss_mask": "?", "logprobs": "<f8", "versions": "<i4"}
"""Token arrays, in the width in which they are stored; logprobs are exact."""


def as_row(rollout: Rollout, iteration: int) -> dict[str, Any]:
    """Columns ``id`` ... ``tokens``, the arrays as lists, ``rest`` as JSON text.

    ``version_min`` and ``version_max`` are over the tokens that the model wrote; None without any.
    """
    record = as_record(rollout)
    arrays = {name: record.pop(name) for name in ARRAYS}
    written = [v for v, m in zip(rollout.versions, rollout.loss_mask, strict=True) if m]
    return {
        "id": rollout.id,
        "group_id": rollout.group_id,
        "prompt_id": rollout.prompt.id,
        "iteration": iteration,
        "version_min": min(written, default=None),
        "version_max": max(written, default=None),
        "reward": rollout.reward,
        "status": rollout.status.value,
        "finish_reason": rollout.finish_reason,
        "tokens": len(rollout.token_ids),
        **arrays,
        "rest": json.dumps(record, ensure_ascii=False, default=str),
    }


def from_row(where: str, row: dict[str, Any]) -> Rollout:
    """Inverse of :func:`as_row`; other columns are left out.

    Raises:
        DataError: naming the place, if the row is no rollout.
    """
    try:
        record: Any = json.loads(row["rest"]) | {name: row[name] for name in ARRAYS}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: damaged row ({error!r}); restore the file") from error
    return as_rollout(where, record)
