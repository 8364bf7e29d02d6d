"""Rollouts as the page reads them: a row of the list for each, and their tokens in blocks."""

import gzip
import json
import math
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from lightning_rl.cli.view.flags import find_flags, gaps
from lightning_rl.cli.view.pictures import places_of
from lightning_rl.cli.view.runs import Record
from lightning_rl.data.rollouts.rows import rows_of, turns_of
from lightning_rl.data.rollouts.token_texts import pieces_of
from lightning_rl.rollout import Message, as_text, said_in

TOKEN_COLUMNS = (
    "logprobs",
    "trainer_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "returns",
)
SHOWN = 300
"""Characters of a text that the list shows at most."""
ROLLOUTS_PER_BLOCK = 256
"""Rollouts per block of tokens, which the page unpacks when one of them is opened."""


def blocks_of(records: Sequence[Record]) -> Iterator[Record]:
    """Yield ``{"rollouts", "texts", "tokens"}`` for every ``ROLLOUTS_PER_BLOCK`` rollouts.

    ``rollouts`` has a row of the list for each. ``tokens`` is packed, and holds numbers row by row,
    little endian, one column after the other: for each prompt and then for each completion token
    the index of its text in ``texts`` (uint32), and for each completion token the ``TOKEN_COLUMNS``
    (float32, nan where nothing was recorded), version (int32) and mask (uint8).
    """
    for start in range(0, len(records), ROLLOUTS_PER_BLOCK):
        some = records[start : start + ROLLOUTS_PER_BLOCK]
        texts: dict[str, int] = {}
        tokens = packed(_numbers(some, texts))
        yield {"rollouts": list(map(_row, some)), "texts": list(texts), "tokens": tokens}


def packed(content: bytes) -> str:
    """Return gzip in base64, which the page unpacks; the same content makes the same text."""
    return b64encode(gzip.compress(content, 6, mtime=0)).decode()


def plain(value: Any) -> Any:
    """Replace nan and infinities, which JSON lacks, by text, such as "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def compact_json(value: Any) -> bytes:
    """Return what :func:`plain` made as compact JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _row(record: Record) -> Record:
    rows = rows_of(record)
    versions = [version for row in rows for version in row["versions"] if version >= 0]
    return {
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "tokens": sum(len(row["token_ids"]) for row in rows),
        "rows": [
            {
                "role": row.get("role", ""),
                "prompt_tokens": len(row["prompt_ids"]),
                "tokens": len(row["token_ids"]),
                "pictures": places_of(row),
            }
            for row in rows
        ],
        "calls": plain(record.get("calls") or []),
        "prompt": as_text(record["prompt"]["prompt"]),
        "completion": as_text(record["completion"]),
        "asked": _last_of("user", record["prompt"]["prompt"])[:SHOWN],
        "answered": _last_of("assistant", record["completion"])[-SHOWN:],
        "turns": turns_of(record["completion"]),
        "columns": plain(record["prompt"].get("columns", {})),
        "set": record["prompt"].get("set") or None,
        "temperature": plain(record["sampling"]["temperature"]),
        "oldest": min(versions, default=None),
        "newest": max(versions, default=None),
        "gap": plain(max((gap for row in rows for _, gap in gaps(row)), default=None)),
        "flags": find_flags(record),
    } | {
        name: plain(record.get(name))
        for name in (
            "id",
            "iteration",
            "group_id",
            "seed",
            "status",
            "finish_reason",
            "reward",
            "reward_parts",
            "role_rewards",
            "extra",
            "error",
            "demonstration",
            "fork",
        )
    }


def _last_of(role: str, content: str | Sequence[Message]) -> str:
    """Return, in one line, a text or the last message of a role (if none, of any) with a text."""
    if isinstance(content, str):
        content = [{"role": role, "content": content}]
    messages = [(m.get("role"), str(said_in(m.get("content")) or "").split()) for m in content]
    mine = [words for speaker, words in messages if words and speaker == role]
    return " ".join((mine or [words for _, words in messages if words] or [[]])[-1])


def _numbers(records: Sequence[Record], texts: dict[str, int]) -> bytes:
    prompts, completions = array("I"), array("I")
    columns = {name: array("f") for name in TOKEN_COLUMNS}
    versions, mask = array("i"), array("B")
    for row in chain.from_iterable(map(rows_of, records)):
        # What is shown for tokens whose own text is unknown.
        numbers = pieces_of(
            lambda ids: [f"⟨{i}⟩" for i in ids], row, row["prompt_ids"], row["token_ids"]
        )
        for target, name in ((prompts, "prompt_pieces"), (completions, "pieces")):
            words = numbers[name] if row.get(name) is None else row[name]
            target.extend(texts.setdefault(word, len(texts)) for word in words)
        count = len(row["token_ids"])
        for name, column in columns.items():
            column.extend(_fit(row.get(name) or (), count, math.nan))
        versions.extend(_fit(row["versions"], count, -1))
        mask.extend(_fit(row["loss_mask"], count, False))
    arrays: list[array[Any]] = [prompts, completions, *columns.values(), versions, mask]
    return b"".join(values.tobytes() for values in arrays)


def _fit(values: Sequence[Any], count: int, filler: Any) -> list[Any]:
    """Cut or fill a list to ``count`` values: a damaged record's may be of another length."""
    return [*values[:count], *[filler] * (count - len(values))]
