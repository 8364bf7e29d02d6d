"""Supervised runs from the command line: killed, resumed, changed, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.kill.compare import differences
from lightning_rl.cli import main
from tests.support.recorded_run import stand_in
from tests.support.resumed import is_time
from tests.support.tiers import slow

ROWS = [
    {"prompt": f"{n}=", "completion": "7" * (1 + n % 4), "chosen": "7" * (1 + n % 3),
     "rejected": "12"[n % 2], "label": n % 2 == 0}
    for n in range(22)
]  # fmt: skip
CLASSES = {
    "sft": ("SFTModule", "SFTDataModule"),
    "dpo": ("DPOModule", "PairDataModule"),
    "kto": ("KTOModule", "KTODataModule"),
    "rm": ("RewardModelModule", "RewardPairDataModule"),
}
KILLER = """
import os, signal
from lightning.pytorch import Callback

class KillAt(Callback):
    def __init__(self, step: int, number: int = 9):
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step and trainer.fit_loop._should_accumulate():
            os.kill(os.getpid(), self.number)
"""
SAVER = {
    "ours": {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 1}},
    "lightning's": {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"save_last": True, "every_n_train_steps": 1},
    },
}


@pytest.fixture
def place(tiny_model, tmp_path, monkeypatch) -> Path:
    """Prepare the working directory, with rows, a model and a callback that kills."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    (tmp_path / "killer.py").write_text(KILLER)
    (tmp_path / "model").symlink_to(tiny_model)
    stand_in(tmp_path, monkeypatch)
    return tmp_path


def write(kind, name, *callbacks, **trainer):
    """Write a configuration whose logs are in ``runs/NAME``."""
    module, data = CLASSES[kind]
    read = {"class_path": "JSONLPrompts"}
    rows = {key: read | {"init_args": {"path": f"{file}.jsonl"}}
            for key, file in (("train", "rows"), ("val", "held_out"))}  # fmt: skip
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}
    config = {
        "seed_everything": 0,
        "model": {"class_path": module, "init_args": {"model": "model", "optimizer": optimizer}},
        "data": {"class_path": data, "init_args": {**rows, "batch_size": 2}},
        "trainer": {
            "accelerator": "cpu", "devices": 1, "max_epochs": 2, "accumulate_grad_batches": 2,
            "enable_progress_bar": False, "enable_model_summary": False, "val_check_interval": 4,
            "logger": {"class_path": "TensorBoardLogger",
                       "init_args": {"save_dir": "runs", "name": name}},
            "callbacks": list(callbacks), **trainer,
        },
    }  # fmt: skip
    Path(f"{name}.yaml").write_text(yaml.safe_dump(config))


def fit(name, *options):
    return main(["fit", "--config", f"{name}.yaml", "--ckpt_path", "last", *options])


def fit_apart(name):
    """Fit in a process of its own; return its exit status."""
    command = [sys.executable, "-m", "lightning_rl", "fit", "--config", f"{name}.yaml",
               "--ckpt_path", "last"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, env=environment, capture_output=True, timeout=300).returncode


def result(name):
    """Return the last weights, optimizer, random states, and rows of metrics but for times."""
    run = Path("runs", name, "version_0")
    assert not run.with_name("version_1").exists(), "another run began"
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    rows, lines = {}, (run / "metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        kept = {key: value for key, value in row.items() if not is_time(key)}
        rows[row["iteration"]] = rows.get(row["iteration"], {}) | kept
    names = ("state_dict", "optimizer_states", "global_step", "epoch")
    return {key: state[key] for key in names} | {
        "rows": rows,
        "own": state["lightning_rl"]["random"],
    }


@pytest.mark.parametrize(
    ("kind", "saver", "step"),
    [("sft", "ours", 4), ("sft", "ours", 1), slow("sft", "lightning's", 4), slow("dpo", "ours", 4),
     slow("kto", "ours", 4), slow("rm", "ours", 4), slow("dpo", "lightning's", 4)],
)  # fmt: skip
def test_a_killed_run_resumes_with_last_and_ends_as_one_that_was_not(place, kind, saver, step):
    write(kind, "whole", SAVER[saver])
    assert fit("whole") == 0
    write(
        kind, "killed", {"class_path": "killer.KillAt", "init_args": {"step": step}}, SAVER[saver]
    )
    assert fit_apart("killed") == -signal.SIGKILL
    write(kind, "killed", SAVER[saver])
    assert fit("killed") == 0
    found = differences(result("killed"), result("whole"), "")
    assert not found, found[:5]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), slow(signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_with_its_status(place, number, status):
    write("sft", "whole")
    assert fit("whole") == 0
    killer = {"class_path": "killer.KillAt", "init_args": {"step": 4, "number": int(number)}}
    write("sft", "stopped", killer)
    assert fit_apart("stopped") == status
    assert (place / "runs/stopped/version_0/checkpoints/iteration_5.ckpt").exists()
    write("sft", "stopped")
    assert fit("stopped") == 0
    found = differences(result("stopped"), result("whole"), "")
    assert not found, found[:5]


def test_what_alters_a_run_is_refused_and_what_is_allowed_holds(place, capsys):
    write("sft", "one", max_epochs=1)
    assert fit("one") == 0
    more = ("--trainer.max_epochs", "2", "--model.optimizer.lr", "0.01")
    for options, words in (
        (more, "model.optimizer.lr: 0.001 then, 0.01 now"),
        (("--data.batch_size", "4"), "data.batch_size: 2 then, 4 now"),
        (("--trainer.accumulate_grad_batches", "1"), "accumulate_grad_batches: 2 then, 1 now"),
        (("--data.train.path", "held_out.jsonl"), "data.train.content: 22 rows"),
    ):
        assert fit("one", *options) == 2
        assert words in capsys.readouterr().err
    assert fit("one", *more, "--allow_changes", "[model.optimizer.lr]") == 0
    rows = result("one")["rows"]
    assert [rows[n]["sft/lr"] for n in (1, 6, 7, 12)] == pytest.approx([1e-3, 1e-3, 1e-2, 1e-2])
