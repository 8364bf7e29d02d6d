"""Run directories, as the viewer reads them."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_rl.cli.view.pictures import thumbnails
from lightning_rl.config.layers import Table, config_files, flatten
from lightning_rl.config.yaml_text import parse_yaml
from lightning_rl.data.rollouts.files import (
    RUN_FILES,
    Record,
    open_rollouts,
    recorded_files,
    require_plain_file,
)
from lightning_rl.data.rollouts.jsonl import parsed, whole_lines
from lightning_rl.data.rollouts.pictures import PictureFolder
from lightning_rl.data.rollouts.token_texts import TokenPieces, pieces_of
from lightning_rl.data.rollouts.validation import shortened
from lightning_rl.errors import ConfigError, DataError

METRICS, SUMMARY = "metrics.jsonl", "summary.json"


@dataclass
class Run:
    """One run: metrics by iteration, its summary, and its last rollouts, oldest first.

    ``state`` says that it failed, or more of a run that is followed. ``settings`` are those of its
    newest configuration, by key, such as ``data.group_size``. ``pictures`` are thumbnails of the
    pictures that its rollouts use and that exist, as ``data:`` URLs by digest.
    """

    name: str
    metrics: list[Record] = field(default_factory=list)
    summary: Record = field(default_factory=dict)
    state: str = ""
    settings: Table = field(default_factory=dict)
    rollouts: list[Record] = field(default_factory=list)
    rollouts_total: int = 0
    pictures: dict[str, str] = field(default_factory=dict)


def find_runs(path: Path) -> list[Path]:
    """``path`` itself if it is a run or a rollout file, else the runs in the folders below it.

    Rollout files are what ``lightning-rl rollout`` writes: ``.jsonl``, ``.parquet``, ``.sqlite``.

    Raises:
        DataError: if there is nothing to show.
    """
    if is_rollout_file(path) or _is_run(path):
        return [path]
    found: list[Path] = []
    for folder, names, _ in os.walk(path):
        runs = [name for name in names if _is_run(Path(folder, name))]
        found += (Path(folder, name) for name in runs)
        names[:] = set(names) - set(runs)  # a run holds many files, and no other run
    if found:
        return sorted(found, key=_by_number)
    if not path.exists():
        raise DataError(f"{path} does not exist (working directory: {Path.cwd()})")
    raise DataError(
        f"{path} holds no run: neither metrics.jsonl (written by the callback RunReport) nor "
        "recorded.jsonl or rollouts.jsonl (RolloutRecorder, PreviewTable); add a callback, or pass "
        "another directory"
    )


def is_rollout_file(path: Path) -> bool:
    """Return True for a rollout file; a Parquet file may be a folder."""
    return path.is_file() or (path.is_dir() and path.suffix == ".parquet")


def name_of(path: Path) -> str:
    """Return what the page calls a run or a rollout file."""
    return str(path) if not path.is_absolute() else str(Path(*path.parts[-3:]))


def read_run(path: Path, max_rollouts: int) -> Run:
    """Read a run directory or a rollout file.

    Raises:
        DataError: for a line that is not a JSON object; a last one that a killed run left
            unfinished is skipped.
    """
    run = Run(name_of(path))
    if is_rollout_file(path):
        files = [open_rollouts(path)]
    else:
        for name in (METRICS, *RUN_FILES):
            require_inside(path, path / name)
        run.metrics = _merge_rows(path / METRICS)
        read_about(run, path)
        run.state = "failed" if run.summary.get("status") == "failed" else ""
        files = recorded_files(path)
    if files:
        last, run.rollouts_total = files[0].tail(max_rollouts)
        run.rollouts = latest(last)
        run.pictures = complete(run, run.rollouts, path, files[0].pictures)
    return run


def read_about(run: Run, path: Path) -> None:
    """Read a run's summary and settings; if they are damaged, the summary's ``error`` says so."""
    require_inside(path, path / SUMMARY)
    run.summary = _read_summary(path / SUMMARY)
    try:
        run.settings = _read_settings(path)
    except (ConfigError, UnicodeDecodeError) as error:
        damaged = f"its configuration is damaged ({error})"
        run.summary["error"] = run.summary.get("error") or damaged


def metrics_row(where: str, line: bytes) -> Record:
    """Return a line's metrics; what JSON stores as null is nan.

    Raises:
        DataError: naming the location, if it is not a row of metrics.
    """
    row = parsed(where, line)
    iteration: Any = row.get("iteration")
    if type(iteration) not in (int, float) or not math.isfinite(iteration):
        raise DataError(
            f"{where}: iteration is {shortened(iteration)}, but must be a number; restore the "
            "file, or remove the line"
        )
    return {name: math.nan if value is None else value for name, value in row.items()}


def latest(rollouts: list[Record]) -> list[Record]:
    """Return the rollouts without those that a resumed run recorded again."""
    records: dict[tuple[int, str], Record] = {}
    for record in rollouts:
        records.pop(key_of(record), None)
        records[key_of(record)] = record
    return list(records.values())


def key_of(rollout: Record) -> tuple[int, str]:
    """Return what tells a rollout from the others of its run."""
    return rollout["iteration"], rollout["id"]


def complete(run: Run, rollouts: list[Record], path: Path, folder: PictureFolder) -> dict[str, str]:
    """Add the texts of tokens to some rollouts of a run; returns thumbnails of their pictures.

    Raises:
        DataError: if the tokenizer is damaged, or a file is a link to outside the run.
    """
    if not is_rollout_file(path):
        require_inside(path, path / "hf" / "tokenizer.json")
        require_inside(path, folder.path)
    _add_pieces(rollouts, path, run.summary)
    return thumbnails(rollouts, folder)


def require_inside(run: Path, file: Path) -> None:
    """Require that a file is in its run: an untrusted run must not show other files.

    Raises:
        DataError: naming the file.
    """
    try:
        inside = file.resolve().is_relative_to(run.resolve())
    except RuntimeError as error:
        raise DataError(f"{file} is a link that points to itself; remove it") from error
    if not inside:
        raise DataError(
            f"{file} is a link to a file outside its run, {file.resolve()}; replace it by the "
            "file if that is what you want to see"
        )


def newest_config(run: Path) -> Path:
    """Return the run's newest configuration; it need not exist."""
    files = config_files(run)
    return files[max(files)]


def _read_summary(path: Path) -> Record:
    """Read the summary; empty if the run is not over, and with ``error`` if it is damaged."""
    require_plain_file(path)
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return {"error": f"{path.name} is damaged ({path.stat().st_size} bytes: {error})"}
    return (
        summary
        if isinstance(summary, dict)
        else {"error": f"{path.name} does not hold a JSON object"}
    )


def _read_settings(run: Path) -> Table:
    """Read the newest configuration; empty if there is none, as of a script's run.

    Raises:
        ConfigError: if it is invalid YAML.
        UnicodeDecodeError: if it is no text.
    """
    file = newest_config(run)
    require_inside(run, file)
    require_plain_file(file)
    if not file.exists():
        return {}
    config = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return flatten(config) if isinstance(config, dict) else {}


def _merge_rows(path: Path) -> list[Record]:
    """Return a row per iteration; a resumed run repeats some, of which the later one is kept."""
    rows: dict[int, Record] = {}
    for number, line in whole_lines(path):
        row = metrics_row(f"{path}:{number}", line)
        rows[row["iteration"]] = rows.get(row["iteration"], {}) | row
    return [rows[iteration] for iteration in sorted(rows)]


def _add_pieces(rollouts: list[Record], run: Path, summary: Record) -> None:
    """Decode tokens that were recorded without their text, if a tokenizer is available."""
    rows = [row for rollout in rollouts for row in rollout["rows"]]
    if all("pieces" in row for row in rows):
        return
    model = summary.get("model")
    folders = [run / "hf", *([Path(model)] if isinstance(model, str) else [])]
    file = next((f for folder in folders if (f := folder / "tokenizer.json").exists()), None)
    if file is None:
        return
    from tokenizers import Tokenizer

    require_plain_file(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing more special
        raise DataError(
            f"{file}: it is not a tokenizer, or is damaged ({error}); restore it, or remove it to "
            "see tokens by their numbers"
        ) from error
    pieces = TokenPieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    for row in rows:
        made = pieces_of(pieces, row, row["prompt_ids"], row["token_ids"])
        row |= {name: text for name, text in made.items() if name not in row}


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (METRICS, *RUN_FILES))


def _by_number(path: Path) -> tuple[str, int, str]:
    """Return a sort key that puts version_10 after version_9."""
    stem, _, number = path.name.rpartition("_")
    if not number.isdigit():
        return str(path.parent), -1, path.name
    return str(path.parent), int(number), stem
