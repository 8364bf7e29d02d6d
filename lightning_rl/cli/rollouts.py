"""``lightning-rl rollouts``: a table and a summary of a rollout file, or of two a comparison."""

import argparse
import json
import sqlite3
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rl.cli.process import CommandParser, printable
from lightning_rl.collect.estimates import Comparison, mean_by_prompt
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.rollouts.jsonl import parsed
from lightning_rl.data.rollouts.store import RolloutStore
from lightning_rl.data.rollouts.validation import shortened
from lightning_rl.errors import ConfigError, DataError, require_at_least

COLUMNS = (
    "id", "group_id", "prompt_id", "iteration", "version_min", "version_max", "reward", "status",
    "finish_reason", "tokens", "created", "run", "state",
)  # fmt: skip
"""Columns for sorting and filtering."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    columns = f"Columns: {', '.join(COLUMNS)}."
    parser = CommandParser("rollouts", "Show recorded rollouts, and count them.", columns)
    parser.add_argument("file", help=".jsonl, .parquet or .sqlite")
    parser.add_argument(
        "--status", help="only this status: completed, failed, aborted, skipped, ..."
    )
    parser.add_argument("--where", help='an SQL condition, e.g. "reward < 0.5 AND tokens > 100"')
    parser.add_argument("--sort", choices=COLUMNS, help="largest first (default: as written)")
    parser.add_argument("--ascending", action="store_true", help="smallest first")
    parser.add_argument("--limit", type=int, default=20, help="rows to show (default: 20)")
    parser.add_argument(
        "--against", help="another such file: compare the rewards of the prompts that both have"
    )
    parser.add_argument(
        "--success_reward", type=float, help="with --against, compare shares of at least this"
    )
    options = parser.parse_args(arguments)
    require_at_least(0, limit=options.limit)
    return options


def main(arguments: Sequence[str]) -> int:
    """Print the table and the summary; returns 0."""
    options = parse_arguments(arguments)
    rows = find_rows(options)
    if options.against is not None:
        for line in compare(rows, options):
            print(printable(line))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.limit and rows:
        console.print(table(rows[: options.limit]))
    for line in summary(rows):
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    return 0


def find_rows(options: argparse.Namespace) -> list[sqlite3.Row]:
    """Return the rows that the options select, in their order.

    Raises:
        ConfigError: if SQLite does not understand the condition.
        DataError: if the file is missing or damaged.
    """
    database = _searchable(options.file).connection
    database.execute("PRAGMA query_only = ON")
    conditions, values = ["state != 'undone'"], []
    if options.status is not None:
        conditions.append("status = ?")
        values.append(options.status)
    if options.where is not None:
        conditions.append(f"({options.where})")
    order = "row" if options.sort is None else f"{options.sort} IS NULL, {options.sort}"
    direction = "" if options.sort is None or options.ascending else " DESC"
    query = (
        f"SELECT {', '.join(COLUMNS)}, rest FROM rollouts WHERE {' AND '.join(conditions)} "
        f"ORDER BY {order}{direction}, row"
    )
    try:
        rows = database.execute(query, values).fetchall()
    except sqlite3.Error as error:
        if options.where is None:  # not the user's words
            raise DataError(f"{options.file}: cannot be read ({error})") from error
        raise ConfigError(
            f"--where {options.where!r}: {error}; write an SQL condition over the columns "
            f"{', '.join(COLUMNS)}"
        ) from error
    for row in rows:
        _require_sound(options.file, row)
    return rows


def _require_sound(file: str, row: sqlite3.Row) -> None:
    """Check the types of a row's values, since SQLite accepts anything as a number."""
    where = f"{file}: rollout {row['id']}"
    for name, kind in (("iteration", int), ("tokens", int), ("reward", float), ("status", str)):
        if type(row[name]) is not kind and (row[name] is not None or name != "reward"):
            raise DataError(f"{where}: {name} is {shortened(row[name])}; restore the file")
    rest = parsed(where, str(row["rest"]).encode())
    prompt = rest.get("prompt")
    if not isinstance(prompt, dict):
        raise DataError(f"{where}: its prompt is {shortened(prompt)}; restore the file")
    for name, content in (("prompt", prompt.get("prompt")), ("completion", rest.get("completion"))):
        is_chat = isinstance(content, list) and all(isinstance(one, dict) for one in content)
        if not isinstance(content, str) and not is_chat:
            raise DataError(f"{where}: its {name} is {shortened(content)}; restore the file")


def _searchable(path: str) -> RolloutStore:
    """Return the file as a database; other formats are read into memory."""
    file = open_rollouts(path)
    if isinstance(file, RolloutStore):
        file.require_existing()
        return file
    store = RolloutStore(":memory:")
    for iteration, recorded in groupby(file.read(), key=lambda r: r.iteration):
        store.append([r.rollout for r in recorded], iteration)
    return store


def compare(rows: Sequence[sqlite3.Row], options: argparse.Namespace) -> list[str]:
    """Compare the rows' file with ``options.against``, prompt by prompt, as lines of text.

    Raises:
        DataError: if the prompts differ, or fewer than two are in both files.
    """
    other = find_rows(argparse.Namespace(**vars(options) | {"file": options.against}))
    now, before = _prompts_of(rows), _prompts_of(other)
    shared = now.keys() & before.keys()
    if differs := next((key for key in now if key in shared and now[key] != before[key]), None):
        raise DataError(
            f"prompt {differs!r} is another in {options.file} than in {options.against}; compare "
            "rollouts of the same data set"
        )
    bound = options.success_reward
    name = "reward" if bound is None else f"reward >= {bound:g}"
    found = Comparison.of(_scores(other, bound), _scores(rows, bound))
    lines = [f"{options.file} against {options.against}: {name} {found}"]
    if left := len(now) + len(before) - 2 * len(shared):
        lines.append(f"{left} prompts are in one file only, and left out")
    return lines


def _prompts_of(rows: Sequence[sqlite3.Row]) -> dict[str, Any]:
    """Return the prompts of rollouts by their keys."""
    prompts = [json.loads(row["rest"])["prompt"] for row in rows]
    return {_key(prompt, row): prompt["prompt"] for prompt, row in zip(prompts, rows, strict=True)}


def _key(prompt: dict[str, Any], row: sqlite3.Row) -> str:
    return f"{prompt['set']}/{row['prompt_id']}" if prompt.get("set") else str(row["prompt_id"])


def _scores(rows: Sequence[sqlite3.Row], bound: float | None) -> dict[str, float]:
    """Return each prompt's mean reward, or its share of rewards of at least ``bound``."""
    graded = [row for row in rows if row["reward"] is not None]
    return mean_by_prompt(
        (
            _key(json.loads(row["rest"])["prompt"], row),
            row["reward"] if bound is None else float(row["reward"] >= bound),
        )
        for row in graded
    )


def table(rows: Sequence[sqlite3.Row]) -> Table:
    """Return a table with one line per rollout."""
    made = Table(header_style="bold", expand=True)
    for name in ("id", "reward", "status", "end", "tokens", "version"):
        made.add_column(name, justify="right" if name == "tokens" else "left")
    for name in ("prompt", "completion or error"):
        made.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        rest = json.loads(row["rest"])
        status = row["status"] if row["state"] == "kept" else f"{row['status']}, {row['state']}"
        versions = {row["version_min"], row["version_max"]} - {None}
        cells = (
            row["id"],
            "" if row["reward"] is None else f"{row['reward']:.4g}",
            status,
            row["finish_reason"] or "",
            row["tokens"],
            "-".join(str(v) for v in sorted(versions)),
            as_line(rest["prompt"]["prompt"]),
            rest.get("error") or as_line(rest["completion"]),
        )
        made.add_row(*(Text(printable(str(cell))) for cell in cells))
    return made


def summary(rows: Sequence[sqlite3.Row]) -> list[str]:
    """Return counts, rewards and tokens of all rows, as lines of text."""
    if not rows:
        return ["no rollouts"]
    groups = {(row["run"], row["group_id"]) for row in rows}
    iterations = {(row["run"], row["iteration"]) for row in rows}
    lines = [f"{len(rows)} rollouts in {len(groups)} groups and {len(iterations)} iterations"]
    for name in ("status", "state"):
        values = [row[name] for row in rows]
        counts = {value: values.count(value) for value in sorted(set(values))}
        if name == "status" or set(counts) != {"kept"}:
            parts = (f"{value} {count}" for value, count in counts.items())
            lines.append(f"{name}: {', '.join(parts)}")
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        lines.append(f"reward: mean {mean:.4g}, from {min(rewards):.4g} to {max(rewards):.4g}")
    tokens = [row["tokens"] for row in rows]
    lines.append(f"tokens: {sum(tokens)} in completions, mean {sum(tokens) / len(rows):.4g}")
    return lines


def as_line(content: Any) -> str:
    """Return a text, or the last of some chat messages, on one line."""
    if not isinstance(content, str):
        content = str(content[-1].get("content")) if content else ""
    return " ".join(content.split())
