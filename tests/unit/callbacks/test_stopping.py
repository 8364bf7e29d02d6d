"""Signals stop every kind of run, with the status that shells expect, and save what can be saved.

Where a run that saves by itself stops, and how it goes on: tests/integration/test_stops.py.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_rl.callbacks import IterationCheckpoint
from lightning_rl.cli import main
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.envs import ActorCriticModule, EnvDataModule, Gym
from lightning_rl.errors import RunInterrupted
from lightning_rl.games import ClassHead, FunctionData, SoloDataModule, SoloModule
from lightning_rl.learn.dpo import DPOModule, PairDataModule
from lightning_rl.learn.kto import KTODataModule, KTOModule
from lightning_rl.learn.reward_model import RewardModelModule, RewardPairDataModule
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from tests.support.bad_configs import CONFIG, furnish
from tests.support.small_run import data_module, grpo, trainer_of
from tests.support.tiers import slow

ROWS = [
    {"prompt": f"{n}=", "completion": "7", "chosen": "7", "rejected": "1", "label": n % 2 == 0}
    for n in range(100, 140)
]


def rows_of(kind):
    return kind(IterablePrompts(ROWS), batch_size=4)


LEARNERS = {
    "GRPO": lambda model: (grpo(model), data_module(group_size=2, groups_per_iteration=2)),
    "SFT": lambda model: (SFTModule(str(model)), rows_of(SFTDataModule)),
    "DPO": lambda model: (DPOModule(str(model)), rows_of(PairDataModule)),
    "KTO": lambda model: (KTOModule(str(model)), rows_of(KTODataModule)),
    "reward model": lambda model: (RewardModelModule(str(model)), rows_of(RewardPairDataModule)),
    "PPO in environments": lambda model: (
        ActorCriticModule(),
        EnvDataModule(Gym("CartPole-v1"), num_envs=2, frames_per_iteration=8),
    ),
    "labels": lambda model: (
        SoloModule(ClassHead(3)),
        SoloDataModule(FunctionData("tests.support.labelled_poles.falling", {"seed": 0}), seed=0),
    ),
}
NUMBERS = [signal.SIGTERM, signal.SIGINT]


class Sends(Callback):
    """Sends this process a signal in the second batch, and counts those that are begun."""

    def __init__(self, number: signal.Signals | str, at: int = 1) -> None:
        self.number = getattr(signal, number) if isinstance(number, str) else number
        self.at, self.begun = at, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.begun += 1
        if batch_idx == self.at:
            os.kill(os.getpid(), self.number)


def handlers():
    return [signal.getsignal(number) for number in (*NUMBERS, signal.SIGUSR1)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_stops_after_the_batch(tiny_model, tmp_path, learner, number):
    module, data = LEARNERS[learner](tiny_model)
    sends, before = Sends(number), handlers()
    with pytest.raises(RunInterrupted) as stopped:
        trainer_of(tmp_path, [sends]).fit(module, data)
    assert stopped.value.status == 128 + number
    assert str(stopped.value) == f"{number.name}; nothing was saved"
    assert sends.begun == 2
    assert handlers() == before


@pytest.mark.parametrize("learner", ["GRPO", "SFT", "PPO in environments"])
def test_it_is_saved_with_lightnings_own_callback(tiny_model, tmp_path, learner):
    saver = ModelCheckpoint(tmp_path / "kept", save_last=True)
    trainer = trainer_of(tmp_path, [saver, Sends(signal.SIGTERM)], enable_checkpointing=True)
    with pytest.raises(RunInterrupted, match="SIGTERM"):
        trainer.fit(*LEARNERS[learner](tiny_model))
    saved = torch.load(saver.last_model_path, weights_only=True)
    assert saved["global_step"] == trainer.global_step > 0


def requeues(monkeypatch, tmp_path, saver, ckpt_path="last") -> list[str]:
    """Return what ``scontrol`` is asked after SIGUSR1 to a Slurm job of one process."""
    told = {"JOB_ID": 17, "NTASKS": 1, "NNODES": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_JOB_NAME", "fit")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    asked = tmp_path / "asked"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    trainer = trainer_of(
        tmp_path,
        [*saver, Sends(signal.SIGUSR1)],
        enable_checkpointing=bool(saver),
        plugins=[SLURMEnvironment()],
    )
    with pytest.raises(RunInterrupted) as stopped:
        trainer.fit(*LEARNERS["PPO in environments"](None), ckpt_path=ckpt_path)
    assert stopped.value.status == 128 + signal.SIGUSR1
    return asked.read_text().splitlines() if asked.exists() else []


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_slurm_job_is_requeued_whenever_it_was_saved_last(monkeypatch, tmp_path, every):
    """The signal comes in the second iteration: after an earlier save, just before one, at one."""
    saver = IterationCheckpoint(every)
    assert requeues(monkeypatch, tmp_path, [saver]) == ["requeue 17"]
    assert Path(saver.last_model_path).name == "iteration_2.ckpt"


def test_a_slurm_job_that_cannot_go_on_is_not_requeued(monkeypatch, tmp_path):
    with pytest.warns(match="not requeued: without --ckpt_path last"):
        assert requeues(monkeypatch, tmp_path, [IterationCheckpoint(1)], ckpt_path=None) == []
    with pytest.warns(match="not requeued after SIGUSR1: without an IterationCheckpoint"):
        assert requeues(monkeypatch, tmp_path, [], ckpt_path=None) == []


# ---------------------------------------------------------------- on the command line


SENDS = f"{__name__}.Sends"
QUIET = CONFIG["trainer"] | {"callbacks": [], "max_epochs": 2}
ROWS_FILE = {"class_path": "JSONLPrompts", "init_args": {"path": "train.jsonl"}}
SFT_DATA = {"train": ROWS_FILE, "completion_column": "answer", "batch_size": 1}
BORING = "lightning.pytorch.demos.boring_classes"
FITS = {
    "GRPO": CONFIG | {"trainer": QUIET},
    "SFT": {
        "model": {"class_path": "SFTModule", "init_args": {"model": "model"}},
        "data": {"class_path": "SFTDataModule", "init_args": SFT_DATA},
        "trainer": QUIET,
    },
    "another library's module": {
        "model": {"class_path": f"{BORING}.BoringModel"},
        "data": {"class_path": f"{BORING}.BoringDataModule"},
        "trainer": QUIET,
    },
}


@pytest.fixture
def place(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything would leave its own
    furnish(tmp_path, tiny_model)
    return tmp_path


def status(place, capsys, configuration, command: str, *options: str) -> int:
    """Return the command's status after a signal at the start of its second batch."""
    (place / "run.yaml").write_text(yaml.safe_dump(configuration))
    status = main([command, "--config", "run.yaml", *options])
    said = capsys.readouterr().err
    assert said.count("lightning-rl: run interrupted: ") == 1, said
    return status


@pytest.mark.parametrize(
    ("kind", "number"), [("GRPO", "SIGTERM"), ("SFT", "SIGINT"), slow("SFT", "SIGTERM"),
                         slow("GRPO", "SIGINT"), ("another library's module", "SIGTERM"),
                         slow("another library's module", "SIGINT")],
)  # fmt: skip
def test_fit_ends_with_the_signals_status(place, capsys, kind, number):
    at = 0 if kind == "GRPO" else 1  # an epoch has one iteration
    sends = {"class_path": SENDS, "init_args": {"number": number, "at": at}}
    configuration = FITS[kind] | {"trainer": FITS[kind]["trainer"] | {"callbacks": [sends]}}
    expected = 128 + getattr(signal, number)
    assert status(place, capsys, configuration, "fit") == expected


class SendsWhileEvaluating:
    """A reward during which this process gets a signal."""

    def __init__(self, number: str) -> None:
        self.number = getattr(signal, number)

    def __call__(self, completions, **columns):
        os.kill(os.getpid(), self.number)
        return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("command", "number"),
    [("validate", "SIGTERM"), ("rollout", "SIGTERM"), slow("test", "SIGTERM"),
     slow("validate", "SIGINT"), ("rollout", "SIGINT")],
)  # fmt: skip
def test_other_commands_do_too_and_at_once(place, capsys, command, number):
    reward = {"class_path": f"{__name__}.SendsWhileEvaluating", "init_args": {"number": number}}
    data = CONFIG["data"]["init_args"] | {"rewards": [reward]}
    configuration = CONFIG | {"data": CONFIG["data"] | {"init_args": data}}
    options = ["--output", "rollouts.jsonl"] if command == "rollout" else []
    expected = 128 + getattr(signal, number)
    assert status(place, capsys, configuration, command, *options) == expected
