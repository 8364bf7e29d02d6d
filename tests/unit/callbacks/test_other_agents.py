"""Callbacks and checkpoints serve any module that counts iterations, and any data that collects."""

import json
import logging

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_rl.callbacks import (
    Evaluate,
    HFExport,
    IterationCheckpoint,
    LengthGuard,
    LogprobGapGuard,
    MetricFloorGuard,
    MetricGuard,
    ParameterSummary,
    PreviewTable,
    RerunRecorder,
    RLCallback,
    RLProgressBar,
    RunReport,
    StepTimer,
    StopRun,
    Watchdog,
    WeightSync,
)
from lightning_rl.errors import ConfigError, GuardError
from lightning_rl.learn.sft import SFTDataModule
from lightning_rl.module import PolicyModule
from lightning_rl.run.files.rundir import run_dir
from tests.support.small_run import trainer_of
from tests.support.walker import Walker, Walks


def test_a_whole_run_that_goes_on(tmp_path, capsys):
    def fit(epochs, **options):
        callbacks = [Evaluate(2), IterationCheckpoint(2), Watchdog(), StepTimer()]
        trainer = trainer_of(
            tmp_path, callbacks, max_epochs=epochs, enable_checkpointing=True,
            enable_progress_bar=True, enable_model_summary=True,
        )  # fmt: skip
        module = Walker()
        trainer.fit(module, Walks(), **options)
        return trainer, module

    trainer, module = fit(1)
    assert module.weight.item() == 1.5
    directory = run_dir(trainer)
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["model"], summary["status"], summary["iterations"]) == (
        "Walker",
        "completed",
        3,
    )
    assert (summary["reward_before"], summary["reward_after"]) == (0.0, 1.5)
    assert summary["accuracy_after"] is None
    assert (directory / "curves.png").exists()
    kinds = {type(callback) for callback in trainer.callbacks}
    assert {RLProgressBar, ParameterSummary, RunReport} <= kinds
    assert "iteration 3/3: reward 1, held-out reward 1.5" in capsys.readouterr().out

    trainer, module = fit(2, ckpt_path="last")
    assert run_dir(trainer) == directory
    assert (module.iteration, module.weight.item()) == (6, 3.0)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evaluated = {row["iteration"]: row.get("eval/reward_mean") for row in rows}
    assert evaluated == {0: 0.0, 1: None, 2: 1.0, 3: 1.5, 4: 2.0, 5: None, 6: 3.0}


def test_half_an_update_is_not_saved(tmp_path):
    class Stumbles(Walker):
        def record(self, metrics):
            super().record(metrics)
            if self.iteration == 3 and "reward/mean" in metrics:
                self.iteration = 2  # as far as anybody knows
                raise ZeroDivisionError("planted")

    trainer = trainer_of(tmp_path, [IterationCheckpoint(1)], enable_checkpointing=True)
    with (
        pytest.warns(UserWarning, match=r"failed within the update of iteration 3, so its state"),
        pytest.raises(ZeroDivisionError),
    ):
        trainer.fit(Stumbles(), Walks())
    assert trainer.checkpoint_callback.saved == ["iteration_1.ckpt", "iteration_2.ckpt"]


def test_frames_are_shown_beside_tokens(tmp_path, capsys):
    class Frames(RLCallback):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            pl_module.record({"rollout/frames_per_s": 4120.0})

    trainer_of(tmp_path, [Frames()], enable_progress_bar=True).fit(Walker(), Walks())
    assert "iteration 1/3: reward 0, frames/s 4,120," in capsys.readouterr().out


def test_metrics_are_guarded_and_stop_early(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of(tmp_path, [MetricGuard("reward/mean", 0.4)]).fit(Walker(), Walks())
    assert "MetricGuard at iteration 2: reward/mean is 0.5, bound=0.4" in caplog.text
    # A guard knows what any callback recorded, also one that follows it in the list.
    guard, report = MetricGuard("eval/reward_mean", 0.6), RunReport()
    trainer_of(tmp_path, [guard, Evaluate(1), report]).fit(Walker(), Walks())
    column = "guard/eval_reward_mean_value"
    assert [row[column] for row in report.history[1:]] == [0.5, 1.0, 1.5]
    with pytest.raises(GuardError, match=r"reward/mean is 0, bound=0.1"):
        trainer_of(tmp_path, [MetricFloorGuard("reward/mean", 0.1, StopRun())]).fit(
            Walker(), Walks()
        )
    module = Walker()
    stopper = EarlyStopping("eval/reward_mean", patience=1, mode="min")
    trainer_of(tmp_path, [Evaluate(1), stopper]).fit(module, Walks())
    assert module.iteration == 1  # as soon as it did not fall


def test_held_out_metrics_are_logged_by_validate_and_test(tmp_path):
    for run in ("validate", "test"):
        trainer = trainer_of(tmp_path)
        [metrics] = getattr(trainer, run)(Walker(), Walks(), verbose=False)
        assert metrics == {"eval/reward_mean": 0.0}


@pytest.mark.parametrize(
    "callback",
    [WeightSync(), PreviewTable(), RerunRecorder(), LengthGuard(), HFExport(), LogprobGapGuard()],
    ids=lambda callback: type(callback).__name__,
)
def test_what_is_for_language_models_is_refused(tmp_path, callback):
    message = rf"{type(callback).__name__} works only with language models, but Walker trains none"
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, [callback]).fit(Walker(), Walks())


def test_nothing_to_evaluate_names_the_data_modules_own_fix(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing to evaluate on; set data\.held_out"):
        trainer_of(tmp_path, [Evaluate()]).fit(Walker(), Walks(held_out=0))


def test_what_a_callback_sees_by_its_type(tmp_path, tiny_model):
    callback, walker = RLCallback(), Walker()
    assert callback.module_of(walker) is walker
    policy = PolicyModule(str(tiny_model))
    assert callback.policy_module_of(policy) is callback.module_of(policy) is policy
    with pytest.raises(ConfigError, match=r"RLCallback needs a PolicyModule, not Walker; remove"):
        callback.policy_module_of(walker)
    trainer = trainer_of(tmp_path)
    trainer.datamodule = data = Walks()
    assert callback.data_of(trainer) is data
    with pytest.raises(ConfigError, match=r"RLCallback needs an RLDataModule, not Walks; remove"):
        callback.rl_data_of(trainer)
    trainer.datamodule = SFTDataModule([{"prompt": "1=", "completion": "2"}])
    with pytest.raises(ConfigError, match=r"such as RLDataModule, not SFTDataModule; remove"):
        callback.data_of(trainer)
