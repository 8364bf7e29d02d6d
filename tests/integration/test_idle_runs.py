"""Runs in which nothing is learned say so by themselves, and why; healthy ones say nothing."""

import json
import logging

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_rl.algos.kl import K3Penalty
from lightning_rl.algos.objective import Decision
from lightning_rl.callbacks import RLCallback
from lightning_rl.module import PolicyModule
from tests.support.small_run import data_module, trainer_of


def right(completions):
    return [1.0] * len(completions)


def wrong(completions):
    return [0.0] * len(completions)


class Skips(RLCallback):
    """Lets no update pass."""

    def on_update_start(self, trainer, pl_module, batch):
        return Decision(skip=True)


def run(tiny_model, tmp_path, rewards=None, callbacks=(), iterations=4, **options):
    more = {} if rewards is None else {"rewards": rewards}
    data = data_module(evaluation=None, iterations_per_epoch=iterations, **more)
    trainer = trainer_of(tmp_path, callbacks)
    trainer.fit(PolicyModule(str(tiny_model), update={"seed": 0}, **options), data)
    return json.loads((tmp_path / "csv" / "version_0" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("rewards", "options", "callbacks", "why"),
    [
        ([right], {}, [], "every reward is 1 (all right)"),
        ([wrong], {}, [], "every reward is 0 (all wrong)"),
        ([right], {"kl": K3Penalty(0.1)}, [], "every reward is 1 (all right)"),
        (None, {}, [Skips()], "the update was skipped"),
    ],
    ids=["right", "wrong", "right with a KL penalty", "skipped"],
)
def test_a_dead_run_says_so_after_three_iterations_and_at_its_end(
    tiny_model, tmp_path, caplog, rewards, options, callbacks, why
):
    with caplog.at_level(logging.INFO):
        summary = run(tiny_model, tmp_path, rewards, callbacks, **options)
    assert summary["alarms"]["learning"] == f"nothing was learned in 4 of 4 iterations: {why}"
    [warning] = [r.message for r in caplog.records if r.message.startswith("LearningAlarms (lea")]
    assert f"iteration 3: nothing was learned in 3 iterations in a row: {why}" in warning
    assert any("\nALARM (learning): nothing was learned in 4" in r.message for r in caplog.records)
    assert summary["stopped_early"] is None


def test_a_run_that_learns_has_no_such_alarm(tiny_model, tmp_path):
    assert "learning" not in run(tiny_model, tmp_path)["alarms"]


def test_an_early_stop_says_so(tiny_model, tmp_path, caplog):
    stopper = EarlyStopping("reward/mean", mode="max", patience=1)
    with caplog.at_level(logging.INFO):
        summary = run(tiny_model, tmp_path, [right], [stopper], iterations=6)
    assert summary["iterations"] == 2
    assert "Monitored metric reward/mean did not improve" in summary["stopped_early"]
    assert any(r.message.startswith("Stopped early: Monitored") for r in caplog.records)
