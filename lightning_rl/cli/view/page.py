"""Writes runs to one HTML file, with compressed data, so that 20,000 rollouts still open."""

import gzip
import html
import json
import math
import re
from array import array
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import Any

from lightning_rl.cli.view.flags import FLAGS, find_flags, gaps
from lightning_rl.cli.view.pictures import places_of
from lightning_rl.cli.view.runs import Record, Run
from lightning_rl.config.layers import differences
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
SCRIPTS = (
    "data.js",
    "curves.js",
    "times.js",
    "tokens.js",
    "transcript.js",
    "rollouts.js",
    "main.js",
)
SHOWN = 300
"""Characters of a text, or of a setting's value, that a list shows at most."""
ROLLOUTS_PER_BLOCK = 256
"""Rollouts per block of tokens, which the page unpacks when one of them is opened."""


def build_page(runs: Sequence[Run]) -> str:
    """Return a page that needs no network: it contains styles, scripts and data.

    The data are gzip blocks in base64. Block ``index`` is JSON: runs with their metrics, and a row
    per rollout. Each block ``tokens-K`` holds numbers of ``ROLLOUTS_PER_BLOCK`` rollouts, row by
    row, little endian, one column after the other: for each prompt and then for each completion
    token the index of its text (uint32), and for each completion token the ``TOKEN_COLUMNS``
    (float32, nan where nothing was recorded), version (int32) and mask (uint8). Block ``pictures``
    is JSON: a ``data:`` URL by digest.
    """
    keys = differing(runs)
    rollouts = [(place, record) for place, run in enumerate(runs) for record in run.rollouts]
    texts: dict[str, int] = {}
    blocks = [
        _token_block([record for _, record in rollouts[start : start + ROLLOUTS_PER_BLOCK]], texts)
        for start in range(0, len(rollouts), ROLLOUTS_PER_BLOCK)
    ]
    index = {
        "runs": [_run_entry(run, keys) for run in runs],
        "rollouts": [_rollout_row(place, record) for place, record in rollouts],
        "texts": list(texts),
        "columns": TOKEN_COLUMNS,
        "block": ROLLOUTS_PER_BLOCK,
        "flags": FLAGS,
    }
    packed = {"index": json.dumps(index, separators=(",", ":"), allow_nan=False).encode()}
    pictures = {digest: url for run in runs for digest, url in run.pictures.items()}
    packed["pictures"] = json.dumps(pictures).encode()
    packed |= {f"tokens-{number}": block for number, block in enumerate(blocks)}
    scripts = "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        "{{title}}": html.escape(", ".join(run.name for run in runs)),
        "{{style}}": _asset("page.css"),
        "{{script}}": f"<script>\n{scripts}</script>",
        "{{data}}": "\n".join(_data_element(name, content) for name, content in packed.items()),
    }
    # In one pass: a run may have the name of a placeholder.
    return re.sub(r"\{\{\w+\}\}", lambda found: parts[found[0]], _asset("page.html"))


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the keys whose values differ between the runs that have a configuration."""
    known = [run.settings for run in runs if run.settings]
    changes = (change for other in known[1:] for change in differences(known[0], other))
    return list(dict.fromkeys(change.key for change in changes))


def _run_entry(run: Run, keys: Sequence[str]) -> Record:
    return {
        "name": run.name,
        "settings": {key: _text(run.settings[key]) for key in keys if key in run.settings},
        "summary": _plain(run.summary),
        "metrics": _plain(run.metrics),
        "rollouts_total": run.rollouts_total,
    }


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _rollout_row(place: int, record: Record) -> Record:
    rows = rows_of(record)
    versions = [version for row in rows for version in row["versions"] if version >= 0]
    return {
        "run": place,
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
        "calls": _plain(record.get("calls") or []),
        "prompt": as_text(record["prompt"]["prompt"]),
        "completion": as_text(record["completion"]),
        "asked": _last_of("user", record["prompt"]["prompt"])[:SHOWN],
        "answered": _last_of("assistant", record["completion"])[-SHOWN:],
        "turns": turns_of(record["completion"]),
        "columns": _plain(record["prompt"].get("columns", {})),
        "set": record["prompt"].get("set") or None,
        "temperature": _plain(record["sampling"]["temperature"]),
        "oldest": min(versions, default=None),
        "newest": max(versions, default=None),
        "gap": _plain(max((gap for row in rows for _, gap in gaps(row)), default=None)),
        "flags": find_flags(record),
    } | {
        name: _plain(record.get(name))
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


def _token_block(records: Sequence[Record], texts: dict[str, int]) -> bytes:
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


def _data_element(name: str, content: bytes) -> str:
    # mtime=0: the same runs make the same file.
    text = b64encode(gzip.compress(content, 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return files("lightning_rl.cli.view").joinpath(name).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """Replace nan and infinities, which JSON lacks, by text, such as "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
