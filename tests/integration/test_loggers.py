"""Test the same numbers in metrics.jsonl, CSV, TensorBoard, W&B and MLflow; tables and checkpoints.

MLflow is not in the environment of the others: ``make environments`` makes one.
"""

import csv
import json
import math
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_rl.callbacks import (
    Evaluate,
    IterationCheckpoint,
    PreviewTable,
    RunArtifacts,
    RunReport,
    StepTimer,
    WeightSync,
)
from lightning_rl.module import PolicyModule
from tests.support.small_run import data_module, trainer_of

Rows = dict[int, dict[str, float]]
"""Metrics by iteration."""


def fit(tiny_model, *loggers: Logger) -> Rows:
    """Fit two iterations; return metrics.jsonl's rows, without its own two columns."""
    data = data_module(
        evaluation={"success_reward": 1.0, "samples": 1},
        groups_per_iteration=2,
        iterations_per_epoch=2,
    )
    callbacks = [
        WeightSync(),
        Evaluate(),
        RunArtifacts(),
        PreviewTable(num_rollouts=3),
        RunReport(),
        StepTimer(),
        IterationCheckpoint(every_n_iterations=1, keep_last=1, monitor="reward/mean"),
    ]
    trainer = trainer_of(Path.cwd(), callbacks, logger=list(loggers), enable_checkpointing=True)
    optimizer = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)}
    trainer.fit(PolicyModule(str(tiny_model), update={"seed": 7}, **optimizer), data)
    lines = (Path(trainer.log_dir) / "metrics.jsonl").read_text().splitlines()
    table = {row.pop("iteration"): row for row in map(json.loads, lines)}
    for row in table.values():
        del row["wall_s"], row["cpu_s"]
    assert sorted(table) == [0, 1, 2]
    assert {"reward/mean", "eval/accuracy", "time/train"} <= set(table[2])
    return table


def previews(directory: Path) -> list[list[list[Any]]]:
    """Return the tables of both iterations, as rollouts.jsonl tells what should be in them."""
    lines = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    rows = [[r["prompt"]["prompt"], r["completion"], r["reward"]] for r in lines]
    assert len(rows) == 6
    return [rows[:3], rows[3:]]


COLUMNS = ["prompt", "completion", "reward", "parts", "end"]


def assert_same(logged: Rows, wanted: Rows) -> None:
    assert {step: set(row) for step, row in logged.items()} == {
        step: set(row) for step, row in wanted.items()
    }
    for step, row in wanted.items():
        assert logged[step] == pytest.approx(row, rel=0.0, abs=0.0, nan_ok=True)


def test_csv_and_tensorboard(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = fit(tiny_model, CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb"))
    with (tmp_path / "csv/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {
        int(row["step"]): {k: float(v) for k, v in row.items() if v and k != "step"} for row in rows
    }
    assert_same(columns, wanted)

    events = EventAccumulator(str(tmp_path / "tb/version_0")).Reload()
    logged: Rows = defaultdict(dict)
    for name in set(events.Tags()["scalars"]) - {"hp_metric"}:
        for event in events.Scalars(name):
            logged[event.step][name] = event.value
    short = {  # TensorBoard keeps 32 bits
        step: {name: torch.tensor(value).item() for name, value in row.items()}
        for step, row in wanted.items()
    }
    assert_same(logged, short)


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield records of a LevelDB log, the format of .wandb files, after the 7 bytes that name it.

    Blocks of 32 KiB hold pieces: checksum (4 bytes), length (2), kind (1: whole, 2: first,
    3: middle, 4: last), content; no piece starts in the last 6 bytes of a block.
    """
    place, parts = 7, []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if place + 7 + length > len(data):
            return  # it is being written
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def wandb_records(file: Path) -> list[Any]:
    """Read all records of a run; the process that writes them may do so after ``finish()``."""
    from wandb.proto.wandb_internal_pb2 import Record

    while True:  # the test's own limit ends it
        records = [Record.FromString(data) for data in log_records(file.read_bytes())]
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)


@pytest.mark.slow
def test_wandb_offline(tiny_model, tmp_path, monkeypatch):
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    logger = WandbLogger(project="test", save_dir=tmp_path, log_model="all")
    wanted = fit(tiny_model, CSVLogger(tmp_path, "csv"), logger)
    logger.experiment.finish()

    (file,) = tmp_path.rglob("run-*.wandb")
    logged: Rows = defaultdict(dict)
    tables, artifacts = [], []
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "artifact":
            artifacts.append(record.artifact)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        step = int(row.pop("trainer/global_step"))
        if "rollouts/path" in row:
            tables.append(json.loads((file.parent / "files" / row["rollouts/path"]).read_text()))
        elif not any(key.startswith("rollouts/") for key in row):
            logged[step] |= {k: v for k, v in row.items() if not k.startswith("_")}
    assert_same(logged, wanted)
    assert [table["columns"] for table in tables] == [COLUMNS] * 2
    assert [[row[:3] for row in t["data"]] for t in tables] == previews(tmp_path / "csv/version_0")
    [results] = [one for one in artifacts if one.type == "results"]
    kept = {entry.path for entry in results.manifest.contents}
    assert kept == {"summary.json", "curves.png", "metrics.jsonl", "rollouts.jsonl"}
    # Every checkpoint is uploaded when it is saved, also one that is deleted later.
    models = [one for one in artifacts if one.type == "model"]
    told = [json.loads(one.metadata) for one in models]
    assert [one["original_filename"] for one in told] == ["iteration_1.ckpt", "iteration_2.ckpt"]
    assert [one["score"] for one in told] == pytest.approx(
        [wanted[iteration]["reward/mean"] for iteration in (1, 2)]
    )


@pytest.mark.slow
def test_mlflow_files(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="it is tested in build/mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for a database otherwise
    logger = MLFlowLogger(tracking_uri=(tmp_path / "mlruns").as_uri(), log_model="all")
    wanted = fit(tiny_model, CSVLogger(tmp_path, "csv"), logger)
    logged: Rows = defaultdict(dict)
    for name in {name for row in wanted.values() for name in row}:
        for metric in logger.experiment.get_metric_history(logger.run_id, name):
            logged[metric.step][name] = metric.value
    assert math.isfinite(logged[2]["policy/loss"])
    assert_same(logged, wanted)
    artifacts = next((tmp_path / "mlruns").glob("*/*/artifacts"))
    tables = [
        json.loads((artifacts / f"rollouts/iteration_00000{iteration}.json").read_text())
        for iteration in (1, 2)
    ]
    assert [table["columns"] for table in tables] == [COLUMNS] * 2
    shown = [row[:3] for table in tables for row in table["data"]]
    for row, given in zip(shown, chain(*previews(tmp_path / "csv/version_0")), strict=True):
        assert row == [*given[:2], pytest.approx(given[2], abs=1e-9)]  # it keeps ten digits
    for name in ("summary.json", "curves.png", "metrics.jsonl", "rollouts.jsonl"):
        assert (artifacts / name).read_bytes() == (tmp_path / "csv/version_0" / name).read_bytes()
    for name in ("iteration_1", "iteration_2"):
        assert (artifacts / name / f"{name}.ckpt").stat().st_size > 100_000
