"""Evaluations come when they are due, whatever the schedule of syncs, with the weights of then."""

import contextlib
import json

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rl.callbacks import Evaluate, RLCallback, RunReport, WeightSync
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.errors import ConfigError
from lightning_rl.run.files.rundir import run_dir
from lightning_rl.sync.schedule import CollectorSchedule, FixedSchedule
from tests.support.small_run import adamw, data_module, grpo, trainer_of


class Pushes(RLCallback):
    """The versions that were pushed."""

    def __init__(self):
        self.versions = []

    def on_weights_synced(self, trainer, pl_module, version):
        self.versions.append(version)


class Stop(Callback):
    """Ends the run cleanly after some iterations, as EarlyStopping and max_time do."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer, pl_module, *rest):
        trainer.should_stop = pl_module.iteration >= self.after


class Fail(Callback):
    def on_train_batch_start(self, trainer, pl_module, *rest):
        if pl_module.iteration == 3:
            raise ZeroDivisionError("planted")


def run(tiny_model, tmp_path, callbacks, module=None, collector=None, **options):
    """Fit; return rows by iteration, the summary and the module."""
    report = RunReport()
    trainer = trainer_of(tmp_path, [*callbacks, report], **options)
    module = module or grpo(tiny_model)
    data = data_module(groups_per_iteration=2, group_size=4, collector=collector)
    with contextlib.suppress(ZeroDivisionError):  # of Fail
        trainer.fit(module, data)
    summary = json.loads((run_dir(trainer) / "summary.json").read_text())
    return {row["iteration"]: row for row in report.history}, summary, module


def evaluated(rows) -> list[int]:
    return [iteration for iteration, row in rows.items() if "eval/accuracy" in row]


@pytest.mark.parametrize("first", [True, False], ids=["WeightSync first", "Evaluate first"])
def test_they_come_when_due_though_weights_are_pushed_rarely(tiny_model, tmp_path, first):
    pushes = Pushes()
    pair = [WeightSync(schedule=FixedSchedule(3)), Evaluate(every_n_iterations=4)]
    rows, summary, _ = run(tiny_model, tmp_path, [*(pair if first else pair[::-1]), pushes])
    assert evaluated(rows) == [0, 4, 8, 10]
    # What was evaluated are the weights of then: of version 4, not the engine's 3.
    assert [rows[i]["sync/version"] for i in evaluated(rows)] == [0, 4, 8, 10]
    assert pushes.versions == [0, 3, 4, 7, 8, 10]
    assert summary["accuracy_after"] == rows[10]["eval/accuracy"]
    assert (summary["accuracy_after_iteration"], summary["iterations"]) == (10, 10)
    assert summary["reward_after"] == rows[10]["eval/reward_mean"] > summary["reward_before"]


@pytest.mark.slow
def test_an_evaluation_is_that_of_a_run_that_pushes_all_the_time(tiny_model, tmp_path):
    # A learning rate of 0 in the first three iterations: rollouts, and so the weights, are the same
    # whether the engine has version 0 or 3. Then one step, and the fourth is evaluated.
    def module():
        return grpo(tiny_model, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: float(step == 3)
        ))  # fmt: skip

    results = [
        run(tiny_model, tmp_path, [WeightSync(schedule=schedule), Evaluate(4)], module())[0]
        for schedule in (FixedSchedule(1), FixedSchedule(3))
    ]
    often, rarely = ({k: v for k, v in r[4].items() if k.startswith("eval/")} for r in results)
    assert often == rarely
    assert often["eval/reward_mean"] != results[0][0]["eval/reward_mean"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "options"), [([Stop(3)], {}), ([], {"max_steps": 3, "max_epochs": -1})]
)
def test_a_run_that_stops_early_is_evaluated_at_its_end(tiny_model, tmp_path, stops, options):
    callbacks = [WeightSync(schedule=FixedSchedule(2)), Evaluate(10), *stops]
    rows, summary, module = run(tiny_model, tmp_path, callbacks, **options)
    assert module.iteration == 3
    assert evaluated(rows) == [0, 3]
    assert rows[3]["sync/version"] == 3
    assert "policy/lr" in rows[3]  # it is one row, though it may have been written in two parts
    assert summary["accuracy_after_iteration"] == 3


def test_what_was_not_evaluated_has_no_accuracy_after(tiny_model, tmp_path):
    rows, summary, _ = run(tiny_model, tmp_path, [WeightSync(), Evaluate(2), Fail()])
    assert evaluated(rows) == [0, 2]
    assert summary["status"] == "failed"
    assert summary["accuracy_before"] == rows[0]["eval/accuracy"]
    after = [summary[name] for name in ("accuracy_after", "accuracy_after_iteration")]
    assert [*after, summary["reward_after"]] == [None, None, None]


@pytest.mark.slow
def test_they_come_while_rollouts_are_made_ahead_and_no_token_is_too_old(tiny_model, tmp_path):
    rows, summary, _ = run(
        tiny_model, tmp_path, [WeightSync(schedule=CollectorSchedule()), Evaluate(4)],
        collector=AsyncCollector(max_staleness=2),
    )  # fmt: skip
    assert evaluated(rows) == [0, 4, 8, 10]
    # The schedule alone would push 3, 6 and 9; an evaluation starts the count anew.
    assert {i: row["sync/version"] for i, row in rows.items() if "sync/version" in row} == {
        i: i for i in (0, 3, 4, 7, 8, 10)
    }
    assert max(row.get("rollout/staleness_max", 0) for row in rows.values()) <= 2
    assert summary["accuracy_after_iteration"] == 10


def test_two_evaluations_are_refused(tiny_model, tmp_path):
    trainer = trainer_of(tmp_path, [Evaluate(2), Evaluate(5)])
    with pytest.raises(ConfigError, match=r"there are 2 Evaluate.*remove all but one"):
        trainer.fit(grpo(tiny_model, optimizer=adamw(1e-3)), data_module())
