"""Default callbacks are the same in a script as on the command line; given ones are kept."""

from contextlib import suppress

import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from benchmarks.support.built import Built
from lightning_rl.callbacks import IterationCheckpoint, RerunRecorder, Watchdog, WeightSync
from lightning_rl.callbacks.learning_alarms import LearningAlarms
from lightning_rl.run.files.checkpoint_io import VerifiedCheckpointIO
from lightning_rl.run.files.resume import KeepConfigs
from lightning_rl.run.files.rundir import run_dir
from tests.support.bad_configs import CONFIG
from tests.support.recorded_run import stand_in
from tests.support.small_run import adamw, data_module, grpo

ROWS = {"class_path": "JSONLPrompts", "init_args": {"path": "train.jsonl"}}
WORLD = {"class_path": "Gym", "init_args": {"name": "tests.support.worlds:Walk-v0"}}
COLLECTS = ["KnownMonitors", "WeightSync", "RLProgressBar", "ParameterSummary", "Watchdog"]
ENDS = ["StopWhenTold", "LearningAlarms", "RunReport", "IterationCheckpoint"]
SHOWN = ["KnownMonitors", "RLProgressBar", "ParameterSummary"]
SUPERVISED = [*SHOWN, "StopWhenTold", "RunReport", "IterationCheckpoint"]
RUNS = {
    "policy": ("PolicyModule", None, [*COLLECTS, "RerunRecorder", *ENDS]),
    "sft": ("SFTModule", "SFTDataModule", SUPERVISED),
    "dpo": ("DPOModule", "PairDataModule", SUPERVISED),
    "kto": ("KTOModule", "KTODataModule", SUPERVISED),
    "reward model": ("RewardModelModule", "RewardPairDataModule", SUPERVISED),
    "environment": ("ActorCriticModule", "EnvDataModule", [*SHOWN, "Watchdog", *ENDS]),
}


@pytest.fixture(autouse=True)
def place(furnished, monkeypatch, tmp_path):
    """Prepare the working directory, with a good configuration."""
    stand_in(furnished, monkeypatch)
    return furnished


def built(kind: str, directory, **trainer) -> Built:
    """Build the objects of a configuration that says nothing of callbacks."""
    module, data, _ = RUNS[kind]
    config = {"model": dict(CONFIG["model"], class_path=module), "data": CONFIG["data"]}
    if data is not None:
        config["data"] = {"class_path": data, "init_args": {"train": ROWS}}
    if kind == "environment":
        config["model"] = {"class_path": module}
        config["data"]["init_args"] = {"env": WORLD, "num_envs": 2, "iterations_per_epoch": 1}
    config["trainer"] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    config["trainer"] |= {"default_root_dir": str(directory)} | trainer
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return Built(["fit", "--config", str(path)])


class Begun(Exception):
    """The run has all its callbacks, and loads nothing."""


def begin(trainer: Trainer, module, data, act: str = "fit", **options) -> list[Callback]:
    """Return the callbacks of a run that ends before it begins."""

    def prepare_data():
        raise Begun

    data.prepare_data = prepare_data
    with pytest.raises(Begun):
        getattr(trainer, act)(module, datamodule=data, **options)
    return [c for c in trainer.callbacks if not isinstance(c, KeepConfigs)]


def names(callbacks: list[Callback]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


def script_of(directory, **options) -> Trainer:
    fixed = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": directory}
    return Trainer(**fixed | options)


@pytest.mark.parametrize("kind", RUNS)
def test_a_script_gets_what_a_configuration_does(kind, tmp_path):
    configured, scripted = built(kind, tmp_path), built(kind, tmp_path)
    by_command = begin(configured.trainer, configured.model, configured.datamodule)
    trainer = script_of(tmp_path)
    by_script = begin(trainer, scripted.model, scripted.datamodule)
    assert names(by_command) == names(by_script) == RUNS[kind][2]
    every = {c.every_n_iterations for c in (by_command[-1], by_script[-1])}
    assert every == {10 if kind in ("policy", "environment") else 500}
    assert type(trainer.strategy.checkpoint_io) is VerifiedCheckpointIO


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({"enable_checkpointing": False}, ["IterationCheckpoint"]),
        ({"logger": False}, ["RerunRecorder"]),
        ({"enable_progress_bar": False}, ["RLProgressBar"]),
        ({"barebones": True}, ["IterationCheckpoint", "RerunRecorder", *SHOWN[1:]]),
        ({"fast_dev_run": True}, ["IterationCheckpoint", "RerunRecorder", "RunReport"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_trainer_has_switched_off_stays_off(tiny_model, tmp_path, options, lacking):
    found = begin(script_of(tmp_path, **options), grpo(tiny_model), data_module())
    everything = RUNS["policy"][2]
    assert [name for name in everything if name not in names(found)] == [
        name for name in everything if name in lacking
    ]


def test_what_is_given_stays_as_it_is(tiny_model, tmp_path):
    class Own(WeightSync):
        """Somebody's own."""

    plugin = AsyncCheckpointIO()
    given = [Watchdog(60.0), Own(), RerunRecorder(rollouts=False), ModelCheckpoint(save_last=True)]
    trainer = script_of(tmp_path, callbacks=list(given), plugins=[plugin])
    found = begin(trainer, grpo(tiny_model), data_module())
    kinds = (Watchdog, WeightSync, RerunRecorder, ModelCheckpoint)
    assert [c for c in found if isinstance(c, kinds)] == given
    assert trainer.strategy.checkpoint_io is plugin


def test_a_run_keeps_nothing_that_only_an_earlier_one_was_given(tiny_model, tmp_path):
    given, module, data = WeightSync(), grpo(tiny_model), data_module()
    trainer = script_of(tmp_path)
    assert names(begin(trainer, module, data)) == names(begin(trainer, module, data))
    walked = built("environment", tmp_path)
    found = begin(trainer, walked.model, walked.datamodule)
    assert sorted(names(found)) == sorted(RUNS["environment"][2])
    evaluated = begin(trainer, module, data, "validate")
    assert not [c for c in evaluated if isinstance(c, LearningAlarms)]
    sft = built("sft", tmp_path)
    trainer = script_of(tmp_path, callbacks=[given])
    assert given in begin(trainer, sft.model, sft.datamodule)


class Cut(Callback):
    """Ends a run within its second iteration, as an error would."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if pl_module.iteration == 1:
            raise ZeroDivisionError


@pytest.mark.parametrize("logger", [True, False])
def test_a_script_goes_on_from_its_own_checkpoint(tiny_model, tmp_path, logger):
    def fit(*callbacks: Callback):
        trainer = script_of(tmp_path, callbacks=list(callbacks), logger=logger)
        module = grpo(tiny_model, optimizer=adamw(1e-3))
        data = data_module(
            evaluation=None, group_size=2, groups_per_iteration=2, iterations_per_epoch=3
        )
        with suppress(ZeroDivisionError):
            trainer.fit(module, data, ckpt_path="last")
        return trainer, module

    cut, begun = fit(Cut())
    gone_on, ended = fit()
    [saver] = [c for c in cut.callbacks if isinstance(c, IterationCheckpoint)]
    assert gone_on.ckpt_path == saver.last_model_path
    assert run_dir(gone_on) == run_dir(cut)
    assert (begun.iteration, ended.iteration) == (1, 3)
