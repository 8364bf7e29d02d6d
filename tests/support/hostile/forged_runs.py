"""Provide ways to forge a recorded run of four iterations; ``lightning-rl audit`` finds each.

Each is given the directory of a run that ended, and changes it as somebody would who wants other
results to be believed. ``FOUND`` says what an audit of the files alone tells of it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from lightning_rl.data.rollouts.ledger import Ledger, digest_of_file, digest_of_json
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.data.rollouts.seals import seal_of
from lightning_rl.run.files.checkpoint_io import write_checkpoint

ROLLOUTS = "rerun/iteration-000003-000.parquet"


def rollout_text(run: Path) -> None:
    """Write another completion into the preview that people read."""
    file = run / "rollouts.jsonl"
    lines = file.read_text().splitlines()
    record = json.loads(lines[0])
    record["completion"] = "a better answer"
    file.write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")


def one_of_two_rewards(run: Path) -> None:
    """Write a reward into its column alone, beside the JSON, and make the ledger agree."""
    table = pyarrow.parquet.read_table(run / ROLLOUTS)
    rewards = table["reward"].to_pylist()
    rewards[0] += 0.5
    column = table.schema.get_field_index("reward")
    changed = table.set_column(column, table.schema.field(column), [rewards])
    pyarrow.parquet.write_table(changed, run / ROLLOUTS)
    agree(run)


def metrics(run: Path) -> None:
    """Change the last row of what curves are drawn from."""
    _replace_last(run / "metrics.jsonl", "reward/mean", 1.0)


def outcomes(run: Path) -> None:
    """Change the mean reward of the last iteration, wherever metrics are recorded."""
    metrics(run)
    file = run / "rerun" / "versions.jsonl"
    *lines, last = file.read_text().splitlines(keepends=True)
    row = json.loads(last)
    row["metrics"]["reward/mean"] = 1.0
    file.write_text("".join([*lines, json.dumps(row) + "\n"]))


def summary(run: Path) -> None:
    """Change the result that scripts read."""
    file = run / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"accuracy_after": 0.99}))


def checkpoint(run: Path) -> None:
    """Write other weights into a checkpoint, whole and with a checksum of its own."""
    file = run / "checkpoints" / "iteration_2.ckpt"
    content = torch.load(file, weights_only=True)
    next(iter(content["state_dict"].values())).view(-1)[0] += 1e-6
    write_checkpoint(content, file)


def last_checkpoint(run: Path) -> None:
    """Put others' file in the place of the link that runs go on from."""
    (run / "checkpoints" / "last.ckpt").unlink(missing_ok=True)
    shutil.copy(run / "checkpoints" / "iteration_2.ckpt", run / "checkpoints" / "last.ckpt")


def missing_checkpoint(run: Path) -> None:
    """Nobody can look at these weights any more."""
    (run / "checkpoints" / "iteration_2.ckpt").unlink()


def added_file(run: Path) -> None:
    """Add rollouts that nothing was trained on."""
    log = RerunLog(run)
    log.write_rollouts(9, 0, log.rollouts(1))


def cut_ledger(run: Path) -> None:
    """Cut the last two iterations; the chain holds."""
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    third = next(i for i, line in enumerate(lines) if '"version": 3' in line)
    (run / "ledger.jsonl").write_text("".join(lines[:third]))


def rechained_ledger(run: Path) -> None:
    """Claim training on another machine; every hash is right, and the head is another."""
    chain_anew(run, lambda entry: entry.get("environment", {}).update(device="another machine"))


def malformed_ledger(run: Path) -> None:
    """Write no entry as a run does; the chain holds."""
    chain_anew(run, lambda entry: entry.update(version="3") if entry["kind"] == "end" else None)


def escapes(run: Path) -> None:
    """Name a file so that it tells the terminal to say that all is well."""
    (run / "\x1b[2K\rnothing was changed\x1b[8m").write_text("")


def clock(run: Path) -> None:
    """It took a tenth of the time; and the file is as old as it was."""
    for name, key in (("summary.json", "wall_s"), ("metrics.jsonl", "time/iteration")):
        file = run / name
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        if name == "summary.json":
            told = json.loads(file.read_text())
            file.write_text(json.dumps(told | {key: told[key] / 10}, indent=2) + "\n")
        else:
            _replace_last(file, key, 0.001)
        os.utime(file, ns=times)


def chain_anew(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write the ledger anew, with each entry changed and every hash right."""
    entries = Ledger(run).entries()
    (run / "ledger.jsonl").unlink()
    ledger = Ledger(run)
    for entry in entries:
        change(entry)
        content = {k: v for k, v in entry.items() if k not in ("kind", "previous", "hash")}
        ledger.append(entry["kind"], **content)


def agree(run: Path) -> None:
    """Write the ledger anew, with the digests of all files as they are now."""
    outcomes = [line for line in RerunLog(run).lines() if line.metrics]

    def change(entry: dict[str, Any]) -> None:
        for name in entry.get("files", {}):
            entry["files"][name] = seal_of(run / name)
        for name in entry.get("rollouts", {}):
            entry["rollouts"][name] = digest_of_file(run / name)
        if "metrics" in entry:
            entry["metrics"] = digest_of_json(outcomes.pop(0).metrics)

    chain_anew(run, change)


def _agreed(forge: Callable[[Path], None]) -> Callable[[Path], None]:
    def forged(run: Path) -> None:
        forge(run)
        agree(run)

    forged.__name__ = f"{forge.__name__}_and_the_ledger"
    return forged


_NOT_WRITTEN = "CHANGED: {} is not what the run wrote"
FOUND: dict[Callable[[Path], None], str] = {
    rollout_text: _NOT_WRITTEN.format("rollouts.jsonl"),
    one_of_two_rewards: f"CHANGED: {ROLLOUTS}: row 0: its column reward says ",
    metrics: _NOT_WRITTEN.format("metrics.jsonl"),
    summary: _NOT_WRITTEN.format("summary.json"),
    checkpoint: "CHANGED: checkpoints/iteration_2.ckpt is not the checkpoint that the run saved",
    last_checkpoint: "CHANGED: checkpoints/last.ckpt, a checkpoint, was added after the end of",
    missing_checkpoint: "CHANGED: checkpoints/iteration_2.ckpt, which the run saved, is missing",
    added_file: "CHANGED: rerun/ extends to iteration 9, but the ledger ends with 4",
    cut_ledger: "CHANGED: rerun/ extends to iteration 4, but the ledger ends with 2",
    rechained_ledger: "does not contain --head",
    malformed_ledger: "is not an entry that a run writes: version of 'end' is '3'",
    escapes: "CHANGED: ␛[2K␍nothing was changed␛[8m, a file, was added after the end of the run",
    clock: _NOT_WRITTEN.format("metrics.jsonl"),
    _agreed(rollout_text): "CHANGED: rollouts.jsonl:1: completion is 'a better answer', but iter",
    _agreed(metrics): "CHANGED: metrics.jsonl:5: reward/mean is 1.0, but 0.0",
    _agreed(outcomes): "CHANGED: the recorded metrics of iteration 4: reward/mean is 1.0, but its",
    _agreed(summary): "CHANGED: summary.json: accuracy_after is 0.99, but the other files say None",
}
"""Each forgery, and what an audit says; that of ``rechained_ledger`` needs a noted ``--head``."""


def _replace_last(file: Path, name: str, value: float) -> None:
    lines = file.read_text().splitlines()
    row = json.loads(lines[-1]) | {name: value}
    file.write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
