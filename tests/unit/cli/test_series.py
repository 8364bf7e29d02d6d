"""Test a test of several checkpoints: which they are, and what comes of each."""

import csv
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_rl import RLTrainer
from lightning_rl.callbacks import Evaluate, IterationCheckpoint
from lightning_rl.cli.series import as_table, checkpoints_named
from lightning_rl.errors import ConfigError, LightningRLError
from lightning_rl.learn.sft import SFTDataModule
from tests.support.small_run import trainer_of
from tests.support.walker import Walker, Walks


@pytest.fixture
def saved(tmp_path) -> Path:
    """Save checkpoints of iterations 1 to 3, with weights 0.5, 1 and 1.5; and links."""
    trainer = trainer_of(tmp_path, [IterationCheckpoint(1, keep_last=3)], enable_checkpointing=True)
    trainer.fit(Walker(), Walks())
    return tmp_path / "csv/version_0/checkpoints"


def trainer_for(tmp_path, **options) -> RLTrainer:
    return trainer_of(tmp_path, kind=RLTrainer, **options)


def test_each_is_tested_in_one_start(saved, tmp_path, capsys):
    trainer, data = trainer_for(tmp_path), Walks()
    rows = trainer.test(Walker(), datamodule=data, checkpoints=str(saved))
    assert (data.starts, data.evaluations) == (1, 3)
    names = [str(saved / f"iteration_{n}.ckpt") for n in (1, 2, 3)]
    assert [row["checkpoint"] for row in rows] == names
    found = [(row["iteration"], row["eval/reward_mean"]) for row in rows]
    assert found == [(1, 0.5), (2, 1.0), (3, 1.5)]
    directory = Path(trainer.log_dir)
    assert json.loads((directory / "test.json").read_text()) == rows
    with (directory / "metrics.csv").open(newline="") as file:
        logged = [(int(r["step"]), float(r["eval/reward_mean"])) for r in csv.DictReader(file)]
    assert logged == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert capsys.readouterr().out.rstrip().endswith(as_table(rows))
    # Afterwards it tests what there is, as before.
    assert trainer_for(tmp_path).test(Walker(), data, verbose=False) == [{"eval/reward_mean": 0.0}]


def test_each_is_compared_with_the_first_task_by_task(saved, tmp_path, capsys):
    class Told(Walks):
        """Solves ten tasks; the larger the weight, the more of them."""

        def scores(self, done):
            weight = self.trainer.lightning_module.weight.item()
            solved = {str(task): float(task < 4 * weight) for task in range(10)}
            return {"accuracy": solved, "reward": solved, "speed": {"0": weight}}

    trainer = trainer_for(tmp_path)
    rows = trainer.test(Walker(), datamodule=Told(), checkpoints=str(saved))
    assert "against" not in rows[0]
    # The reward says nothing new, and one task is too few.
    assert [list(row["against"]) for row in rows[1:]] == [["accuracy"], ["accuracy"]]
    third = rows[2]["against"]["accuracy"]
    assert (third["before"], third["after"], third["won"], third["lost"]) == (0.2, 0.6, 4, 0)
    assert third["p_value"] == 2 / 16
    assert json.loads((Path(trainer.log_dir) / "test.json").read_text()) == rows
    last = capsys.readouterr().out.splitlines()[-1]
    names = [saved / f"iteration_{n}.ckpt" for n in (3, 1)]
    assert last.startswith(f"{names[0]} against {names[1]}: accuracy 0.2 → 0.6, +0.4 [")


def test_an_interval_stands_behind_its_metric():
    row = {"checkpoint": "a", "eval/accuracy": 0.5, "eval/accuracy_low": 0.25}
    rows = [row | {"eval/accuracy_high": 0.75, "eval/too_low": 1.0}, {"checkpoint": "b"}]
    assert [line.split() for line in as_table(rows).splitlines()] == [
        ["checkpoint", "eval/accuracy", "eval/too_low"],
        ["a", "0.5", "[0.25,", "0.75]", "1"],
        ["b"],
    ]


def test_a_list_is_tested_in_its_order_and_links_in_it_count(saved, tmp_path):
    names = [saved / "last.ckpt", saved / "iteration_1.ckpt", saved / "last.ckpt"]
    rows = trainer_for(tmp_path).test(Walker(), Walks(), checkpoints=[str(n) for n in names])
    assert [row["eval/reward_mean"] for row in rows] == [1.5, 0.5, 1.5]


def test_rows_so_far_stay_when_one_fails(saved, tmp_path):
    class Fails(Walks):
        def evaluate(self):
            if self.evaluations == 2:
                raise ZeroDivisionError("planted")
            return super().evaluate()

    trainer, data = trainer_for(tmp_path), Fails()
    with pytest.raises(ZeroDivisionError):
        trainer.test(Walker(), data, checkpoints=str(saved))
    assert len(json.loads((Path(trainer.log_dir) / "test.json").read_text())) == 2
    assert data.test_series is None


def test_a_folder_is_in_the_order_of_iterations(tmp_path):
    for iteration in (10, 9, 100):
        torch.save(
            {"lightning_rl": {"iteration": iteration}}, tmp_path / f"iteration_{iteration}.ckpt"
        )
    (tmp_path / "last.ckpt").symlink_to("iteration_100.ckpt")
    found = [path.stem for path in checkpoints_named(tmp_path)]
    assert found == ["iteration_9", "iteration_10", "iteration_100"]


def test_what_cannot_be_tested_is_said_before_anything_starts(saved, tmp_path):
    def refused(checkpoints, match, module=None, data=None, **options):
        data = data or Walks()
        with pytest.raises(ConfigError, match=match) as caught:
            trainer_for(tmp_path).test(module or Walker(), data, checkpoints=checkpoints, **options)
        assert "\n" not in str(caught.value)
        assert getattr(data, "starts", 0) == 0

    good = str(saved / "iteration_1.ckpt")
    refused([good, "gone.ckpt"], r"checkpoints: 'gone\.ckpt' does not exist \(working directory")
    bad = saved / "iteration_2.ckpt"
    bad.write_bytes(bad.read_bytes()[:-3])
    refused(str(saved), r"iteration_2\.ckpt' cannot be used: .* is damaged: .*; use .*iteration_3")
    refused([], r"the list is empty")
    refused(str(saved.parent), r"holds no \*\.ckpt; did you mean .*version_0/checkpoints\?")
    (tmp_path / "empty").mkdir()
    refused(str(tmp_path / "empty"), r"holds no \*\.ckpt; pass a folder of checkpoints, or a list")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    refused(str(tmp_path / "other.ckpt"), r"other\.ckpt' records no iteration")
    refused([good], r"ckpt_path='.*' and checkpoints both set what to test", ckpt_path=good)
    refused([good], r"nothing to evaluate on; set data\.held_out", data=Walks(held_out=0))
    sft = SFTDataModule([{"prompt": "1=", "completion": "2"}])
    refused([good], r"SFTDataModule evaluates nothing by itself", data=sft)
    refused([good], r"LightningModule counts no iterations", LightningModule())


def test_a_checkpoint_of_another_model_is_told(saved, tmp_path):
    class Other(Walker):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1))

    with pytest.raises(LightningRLError, match=r"iteration_1\.ckpt is of another model: .*bias"):
        trainer_for(tmp_path).test(Other(), Walks(), checkpoints=str(saved))


def test_a_table_by_hand():
    rows = [
        {"checkpoint": "a.ckpt", "iteration": 5, "eval/accuracy": 0.25},
        {"checkpoint": "longer.ckpt", "iteration": 10, "eval/accuracy": 1 / 3, "eval/own": 2.0},
    ]
    assert as_table(rows).splitlines() == [
        "checkpoint   iteration  eval/accuracy  eval/own",
        "a.ckpt               5           0.25          ",
        "longer.ckpt         10         0.3333         2",
    ]


def test_a_run_may_be_saved_only_at_its_end(tmp_path):
    saver = IterationCheckpoint(0)
    trainer = trainer_of(tmp_path, [saver], enable_checkpointing=True)
    trainer.fit(Walker(), Walks())
    assert saver.saved == ["iteration_3.ckpt"]


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
def test_a_run_goes_on_beside_lightnings_own_checkpoints(tmp_path, logger, ours_first):
    """Lightning's checkpoint asks the logger for its folder first, which draws a new number."""

    def fit(epochs: int, **options) -> tuple[str, float]:
        savers = [IterationCheckpoint(1), ModelCheckpoint()][:: 1 if ours_first else -1]
        trainer = trainer_of(
            tmp_path, savers, enable_checkpointing=True, max_epochs=epochs, logger=logger(tmp_path)
        )
        module = Walker()
        trainer.fit(module, Walks(), **options)
        return trainer.log_dir, module.iteration

    directory, iterations = fit(1)
    assert iterations == 3
    assert fit(2, ckpt_path="last") == (directory, 6)
    assert len(list(Path(directory).parent.iterdir())) == 1


@pytest.mark.parametrize("steps", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 6}])
def test_who_validates_first_trains_all_iterations(tmp_path, steps):
    trainer, module, data = trainer_of(tmp_path, **steps), Walker(), Walks()
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    assert module.iteration == 6


def test_a_second_run_counts_on_and_ends_where_it_does(tmp_path, capsys):
    module, data = Walker(), Walks()
    for name in ("first", "second"):
        trainer = trainer_of(tmp_path / name, [Evaluate(99)], enable_progress_bar=True)
        trainer.fit(module, data)
    said = capsys.readouterr().out
    assert "iteration 3/3" in said
    assert "iteration 6/6" in said
    evaluated = [
        json.loads(line)["iteration"]
        for line in (Path(trainer.log_dir) / "metrics.jsonl").read_text().splitlines()
        if "eval/" in line
    ]
    assert evaluated == [3, 6]  # before it, and at its end
