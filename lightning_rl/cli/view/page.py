"""Writes runs to one HTML file, with compressed data, so that 20,000 rollouts still open."""

import hashlib
import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from lightning_rl.cli.view.blocks import TOKEN_COLUMNS, blocks_of, compact_json, packed, plain
from lightning_rl.cli.view.flags import FLAGS
from lightning_rl.cli.view.runs import Record, Run
from lightning_rl.config.layers import differences

SCRIPTS = (
    "data.js",
    "receive.js",
    "curves.js",
    "differences.js",
    "times.js",
    "tokens.js",
    "transcript.js",
    "rollouts.js",
    "main.js",
)


def build_page(runs: Sequence[Run]) -> str:
    """Return a page that needs no network: it contains styles, scripts and data.

    The data are packed. ``index`` is JSON: what ``receive.js`` takes. Of each block of rollouts
    (``blocks_of``) the tokens are apart, as ``tokens-K``, and so are all ``pictures``: JSON, a
    ``data:`` URL by digest. The page unpacks them when a rollout is opened.
    """
    keys = differing(runs)
    tokens: dict[str, str] = {}

    def apart(block: Record) -> Record:
        name = f"tokens-{len(tokens)}"
        tokens[name] = block["tokens"]
        return block | {"tokens": name}

    entries = [
        about(run, keys)
        | {"metrics": plain(run.metrics), "blocks": list(map(apart, blocks_of(run.rollouts)))}
        for run in runs
    ]
    pictures = {digest: url for run in runs for digest, url in run.pictures.items()}
    data = {"pictures": packed(compact_json(pictures)), **tokens}
    return _page([run.name for run in runs], entries, data, SCRIPTS, connects_to="'none'")


def build_followed_page(names: Sequence[str]) -> str:
    """Return a page without data, which asks its server for them again and again."""
    return _page(names, [], {}, (*SCRIPTS, "follow.js"), connects_to="'self'")


def about(run: Run, keys: Sequence[str]) -> Record:
    """Return what the page shows of a run besides its metrics and rollouts."""
    return {
        "name": run.name,
        "state": run.state,
        "settings": {key: _text(run.settings[key]) for key in keys if key in run.settings},
        "summary": plain(run.summary),
        "rollouts_total": run.rollouts_total,
    }


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the keys whose values differ between the runs that have a configuration."""
    known = [run.settings for run in runs if run.settings]
    changes = (change for other in known[1:] for change in differences(known[0], other))
    return list(dict.fromkeys(change.key for change in changes))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _page(
    names: Sequence[str],
    entries: list[Record],
    data: Mapping[str, str],
    scripts: Sequence[str],
    connects_to: str,
) -> str:
    index = {"columns": TOKEN_COLUMNS, "flags": FLAGS, "runs": entries}
    script = "\n".join(map(_asset, scripts))
    elements = {"index": packed(compact_json(index)), **data}
    parts = {
        "{{title}}": html.escape(", ".join(names)),
        "{{style}}": _asset("page.css"),
        "{{script}}": f"<script>{script}</script>",
        "{{script_hash}}": b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "{{connects_to}}": connects_to,
        "{{data}}": "\n".join(
            f'<script type="text/plain" id="{name}">{content}</script>'
            for name, content in elements.items()
        ),
    }
    # In one pass: a run may have the name of a placeholder.
    return re.sub(r"\{\{\w+\}\}", lambda found: parts[found[0]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("lightning_rl.cli.view").joinpath(name).read_text(encoding="utf-8")
