"""Every flag and callback of Lightning's that works does so, in runs of two small iterations."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as theirs
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from transformers import AutoModelForCausalLM

from lightning_rl.callbacks import Evaluate, HFExport, IterationCheckpoint, RLCallback, WeightSync
from lightning_rl.config.lightning_flags import CALLBACKS, TRAINER, Verdict
from lightning_rl.errors import ConfigError, StaleWeightsError
from lightning_rl.run.files.rundir import run_dir
from tests.support.small_run import data_module, grpo, trainer_of


class Seen(RLCallback):
    """Prompts and seeds of each iteration."""

    def __init__(self) -> None:
        self.prompts: list[list[str]] = []
        self.seeds: list[list[int]] = []

    def on_collect_end(self, trainer, pl_module, rollouts):
        self.prompts.append([rollout.prompt.id for rollout in rollouts[::2]])
        self.seeds.append([rollout.seed for rollout in rollouts])


def small_data(**options: Any):
    small = {"groups_per_iteration": 2, "group_size": 2, "iterations_per_epoch": 2}
    return data_module(**(small | {"evaluation": {"limit": 2, "samples": 1}} | options))


def small(tiny_model: Path, tmp_path: Path, *callbacks: Any, model: Any = None, **flags: Any):
    """Run two iterations of four rollouts, and note what was seen of them."""
    seen = Seen()
    trainer = trainer_of(tmp_path, [WeightSync(), seen, *callbacks], **({"logger": False} | flags))
    trainer.fit(grpo(tiny_model, **(model or {})), small_data())
    return trainer, seen


def iterations(trainer: Trainer) -> int:
    return trainer.lightning_module.iteration


def logged(trainer: Trainer) -> list[dict[str, str]]:
    with Path(trainer.log_dir, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def settings_of_torch():
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def stop_at_once() -> theirs.EarlyStopping:
    return theirs.EarlyStopping("reward/mean", mode="max", stopping_threshold=-1.0)


Check = Callable[[Path, Path], None]
FLAGS: dict[str, Check] = {}
THEIRS: dict[str, Check] = {}


def of(table: dict[str, Check], *names: str) -> Callable[[Check], Check]:
    def note(check: Check) -> Check:
        table.update(dict.fromkeys(names, check))
        return check

    return note


@of(FLAGS, "precision")
def precision(tiny_model, tmp_path):
    trainer, _ = small(tiny_model, tmp_path, precision="bf16-mixed")
    assert trainer.datamodule.engine.dtype == "bfloat16"
    assert 0 < float(trainer.callback_metrics["sync/probe_gap"]) < 0.25


@of(FLAGS, "default_root_dir")
def default_root_dir(tiny_model, tmp_path):
    for number in range(2):
        trainer, _ = small(tiny_model, tmp_path)
        assert run_dir(trainer) == tmp_path / f"lightning_rl_runs/version_{number}"


@of(FLAGS, "fast_dev_run")
def fast_dev_run(tiny_model, tmp_path):
    # An iteration has two optimizer steps, in which Lightning would count.
    trainer, _ = small(tiny_model, tmp_path, fast_dev_run=2, model={"minibatches": 2})
    assert iterations(trainer) == 2
    assert not list(tmp_path.iterdir())


@of(FLAGS, "max_epochs")
def max_epochs(tiny_model, tmp_path):
    assert iterations(small(tiny_model, tmp_path, max_epochs=2)[0]) == 4


@of(FLAGS, "min_epochs", "min_steps")
def minima(tiny_model, tmp_path):
    def run(**flags: int) -> int:
        return iterations(small(tiny_model, tmp_path, stop_at_once(), max_epochs=3, **flags)[0])

    assert (run(), run(min_epochs=2), run(min_steps=3)) == (1, 4, 3)


@of(FLAGS, "max_steps")
def max_steps(tiny_model, tmp_path):
    trainer, _ = small(tiny_model, tmp_path, max_steps=3, max_epochs=3, model={"minibatches": 2})
    assert iterations(trainer) == 2


@of(FLAGS, "max_time")  # for which Lightning makes a Timer
@of(THEIRS, "Timer")
def max_time(tiny_model, tmp_path):
    assert iterations(small(tiny_model, tmp_path, max_time={"seconds": 0})[0]) <= 1


@of(FLAGS, "limit_train_batches")
def limit_train_batches(tiny_model, tmp_path):
    for limit in (1, 0.5):
        trainer, seen = small(tiny_model, tmp_path, limit_train_batches=limit, max_epochs=3)
        assert iterations(trainer) == len({tuple(ids) for ids in seen.prompts}) == 3


@of(FLAGS, "overfit_batches")
def overfit_batches(tiny_model, tmp_path):
    trainer, seen = small(tiny_model, tmp_path, overfit_batches=2, max_epochs=3)
    assert iterations(trainer) == 6
    assert seen.prompts == seen.prompts[:2] * 3
    assert seen.prompts[0] != seen.prompts[1]
    assert len({seed for seeds in seen.seeds for seed in seeds}) == 6 * 4


@of(FLAGS, "deterministic")
def deterministic(tiny_model, tmp_path):
    first, second = (small(tiny_model, tmp_path, deterministic=True)[0] for _ in range(2))
    assert first.callback_metrics["policy/loss"] == second.callback_metrics["policy/loss"]
    assert torch.are_deterministic_algorithms_enabled()


@of(FLAGS, "inference_mode")
def inference_mode(tiny_model, tmp_path):
    for mode in (True, False):
        trainer = trainer_of(tmp_path, [WeightSync()], logger=False, inference_mode=mode)
        [row] = trainer.validate(grpo(tiny_model), small_data(), verbose=False)
        assert 0 <= row["eval/accuracy"] <= 1


@of(FLAGS, "barebones")
def barebones(tiny_model, tmp_path):
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    trainer = Trainer(barebones=True, max_epochs=1, callbacks=[WeightSync()], **options)
    trainer.fit(grpo(tiny_model), small_data())
    assert iterations(trainer) == 2


@of(THEIRS, "EarlyStopping")
def early_stopping(tiny_model, tmp_path):
    """Look at each evaluation once; with lr 0 the second is no better, nor is the third."""
    stopper = theirs.EarlyStopping("eval/reward_mean", mode="max", patience=2)
    frozen = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    evaluate = Evaluate(every_n_iterations=2)
    flags = {"max_epochs": 9, "limit_train_batches": 1.0}
    trainer, _ = small(tiny_model, tmp_path, evaluate, stopper, model=frozen, **flags)
    assert (iterations(trainer), stopper.wait_count) == (4, 2)  # evaluated at 0, 2 and 4
    # It stops in the middle of an epoch (see ``minima``), unless that is left to the epoch's end.
    late = theirs.EarlyStopping(
        "reward/mean", mode="max", stopping_threshold=-1.0, check_on_train_epoch_end=True
    )
    assert iterations(small(tiny_model, tmp_path, late, max_epochs=2)[0]) == 2
    with pytest.raises(ConfigError, match="did you mean reward/mean"):
        small(tiny_model, tmp_path, theirs.EarlyStopping("reward/meen", mode="max"))


@of(THEIRS, "WeightAveraging", "EMAWeightAveraging")
def weight_averaging(tiny_model, tmp_path):
    """The average after two iterations is the mean of three sets of weights, the first included."""
    snapshots: list[torch.Tensor] = []

    class Snapshots(RLCallback):
        def on_train_batch_end(self, trainer, pl_module, *arguments):
            snapshots.append(next(pl_module.policy.parameters()).detach().clone())

    mean, export = theirs.WeightAveraging(), HFExport()
    trainer, _ = small(tiny_model, tmp_path, Snapshots(), mean, export)
    wanted = (snapshots[0] + snapshots[1]) / 2
    model = AutoModelForCausalLM.from_pretrained(export.target(trainer))
    torch.testing.assert_close(next(model.parameters()).data, wanted)
    trainer, _ = small(tiny_model, tmp_path, theirs.EMAWeightAveraging(decay=0.5))
    assert iterations(trainer) == 2


@of(THEIRS, "RichProgressBar", "RichModelSummary")
def rich(tiny_model, tmp_path):
    callbacks = [theirs.RichProgressBar(), theirs.RichModelSummary()]
    shown = {"enable_progress_bar": True, "enable_model_summary": True}
    trainer, _ = small(tiny_model, tmp_path, *callbacks, **shown)
    assert iterations(trainer) == 2


@of(FLAGS, "accelerator", "strategy", "devices", "num_nodes", "callbacks", "logger", "profiler")
@of(FLAGS, "num_sanity_val_steps", "enable_progress_bar", "enable_model_summary", "plugins")
@of(FLAGS, "use_distributed_sampler", "benchmark", "detect_anomaly", "enable_autolog_hparams")
@of(FLAGS, "enable_checkpointing")
@of(THEIRS, "LearningRateMonitor", "ModelCheckpoint", "Checkpoint", "LambdaCallback", "Callback")
@of(THEIRS, "DeviceStatsMonitor", "ThroughputMonitor")
@of(THEIRS, "TQDMProgressBar", "ProgressBar", "ModelSummary")
def together(tiny_model, tmp_path):
    """Run once with all that leave each other alone."""
    ends: list[int] = []
    best = theirs.ModelCheckpoint(tmp_path / "best", monitor="reward/mean", mode="max")
    latest = IterationCheckpoint()
    callbacks = [
        theirs.LearningRateMonitor("step"),
        theirs.LambdaCallback(on_train_batch_end=lambda *_: ends.append(1)),
        theirs.DeviceStatsMonitor(cpu_stats=True),
        theirs.ThroughputMonitor(lambda batch: len(batch["rollouts"]), window_size=2),
        theirs.TQDMProgressBar(),
        theirs.ModelSummary(),
        best,
        latest,
    ]
    logger = CSVLogger(tmp_path, "csv")
    flags = {"strategy": "auto", "num_nodes": 1, "logger": logger, "log_every_n_steps": 1}
    flags |= {"num_sanity_val_steps": 0, "use_distributed_sampler": False, "benchmark": True}
    flags |= {"detect_anomaly": True, "enable_autolog_hparams": False, "profiler": "simple"}
    flags |= {"enable_progress_bar": True, "enable_model_summary": True}
    flags |= {"enable_checkpointing": True, "plugins": [TorchCheckpointIO()]}
    trainer, seen = small(tiny_model, tmp_path, *callbacks, **flags)
    assert trainer.strategy.root_device.type == "cpu"  # accelerator and devices are always given
    assert len(seen.prompts) == iterations(trainer) == len(ends) == 2
    assert run_dir(trainer) == tmp_path / "csv/version_0"
    assert logger.experiment.hparams == {}
    assert "run_training_batch" in trainer.profiler.summary()
    assert Path(latest.last_model_path).name == "iteration_2.ckpt"
    state = torch.load(best.best_model_path, weights_only=True)
    assert state["lightning_rl"]["iteration"] == 2
    rows = logged(trainer)
    assert any("cpu_percent" in name for name in rows[0])
    counts = {"lr-AdamW": 2, "policy/lr": 2, "train/device/samples_per_sec": 1}
    assert {name: sum(bool(row[name]) for row in rows) for name in counts} == counts


@of(FLAGS, "log_every_n_steps")
def every_second_step(tiny_model, tmp_path):
    logger, monitor = CSVLogger(tmp_path, "csv"), theirs.LearningRateMonitor("step")
    flags = {"logger": logger, "log_every_n_steps": 2}
    rows = logged(small(tiny_model, tmp_path, monitor, **flags)[0])
    assert sum(bool(row["lr-AdamW"]) for row in rows) == 1
    assert sum(bool(row["policy/lr"]) for row in rows) == 2


@of(THEIRS, "BasePredictionWriter")
def prediction_writer(tiny_model, tmp_path):
    class Counting(theirs.BasePredictionWriter):
        sizes: list[int] = []  # noqa: RUF012

        def write_on_batch_end(self, trainer, pl_module, prediction, *arguments):
            self.sizes.append(len(prediction))

    writer = Counting("batch")
    trainer = trainer_of(tmp_path, [WeightSync(), writer], logger=False)
    trainer.predict(grpo(tiny_model), small_data(), return_predictions=False)
    assert writer.sizes == [4, 4]


CHECKS = {check.__name__: check for check in [*FLAGS.values(), *THEIRS.values()]}


@pytest.mark.parametrize("name", CHECKS)
def test_it_works(name, tiny_model, tmp_path):
    CHECKS[name](tiny_model, tmp_path)


def test_everything_that_works_is_run():
    works = (Verdict.WORKS, Verdict.PARTLY)
    assert set(FLAGS) == {name for name, entry in TRAINER.items() if entry.verdict in works}
    # ModelCheckpoint's other triggers.
    wanted = {name for name, entry in CALLBACKS.items() if entry.verdict in works}
    assert set(THEIRS) == wanted | {"ModelCheckpoint"}


def test_the_probe_names_the_dtypes_of_both_sides(tiny_model, tmp_path):
    trainer = trainer_of(tmp_path, [WeightSync(max_gap=1e-7)], logger=False, precision="bf16-mixed")
    message = r"trainer -?[\d.]+ in bfloat16, engine -?[\d.]+ in bfloat16; max_gap=1e-07"
    with pytest.raises(StaleWeightsError, match=message):
        trainer.fit(grpo(tiny_model), small_data())
    # An engine that was told otherwise is compared with the looser bound too.
    data = small_data()
    data.engine.choose_dtype("float32")
    trainer = trainer_of(tmp_path, [WeightSync()], logger=False, precision="bf16-mixed")
    trainer.fit(grpo(tiny_model), data)
    assert float(trainer.callback_metrics["sync/probe_gap"]) > 1e-3


def test_overfitting_goes_on_after_a_resume(tiny_model, tmp_path):
    def run(ckpt_path: str | None, epochs: int) -> Seen:
        seen = Seen()
        callbacks = [WeightSync(), seen, IterationCheckpoint(1)]
        flags = {"enable_checkpointing": True, "overfit_batches": 2, "max_epochs": epochs}
        trainer = trainer_of(tmp_path, callbacks, logger=False, **flags)
        trainer.fit(grpo(tiny_model), small_data(), ckpt_path=ckpt_path)
        return seen

    whole = run(None, 4)
    first = run(None, 2)
    rest = run("last", 4)
    assert first.prompts + rest.prompts == whole.prompts
    assert first.seeds + rest.seeds == whole.seeds
    runs = sorted((tmp_path / "lightning_rl_runs").iterdir())
    assert [path.name for path in runs] == ["version_0", "version_1"]
