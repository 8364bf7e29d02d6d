"""Test what a person sees of a script's run: lines or a bar, how it went, where it lies."""

import io
import json
import logging
import re
import sys
import warnings

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.model_summary import get_human_readable_count

from lightning_rl.callbacks import (
    Evaluate,
    LearningAlarms,
    ParameterSummary,
    RLProgressBar,
    RunReport,
    WeightSync,
)
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from tests.support.small_run import adamw, data_module, grpo, trainer_of


def script(tmp_path, *callbacks, **options) -> Trainer:
    """Return a Trainer as one writes it in a script: with Lightning's own bar and summary."""
    options = {"enable_checkpointing": False, "max_epochs": 1} | options
    return Trainer(
        accelerator="cpu", devices=1, default_root_dir=tmp_path,
        callbacks=[WeightSync(), Evaluate(2), *callbacks], **options,
    )  # fmt: skip


def small(**options):
    return data_module(**({"iterations_per_epoch": 3, "groups_per_iteration": 4} | options))


class Warns(Callback):
    def on_train_start(self, trainer, pl_module) -> None:
        warnings.warn("the number of training batches is odd", stacklevel=1)


def test_a_script_gets_lines_the_outcome_and_the_run_directory(
    tiny_model, tmp_path, capfd, caplog, recwarn
):
    caplog.set_level(logging.INFO)
    module = grpo(tiny_model)
    script(tmp_path, Warns()).fit(module, small())
    out, _ = capfd.readouterr()
    told = caplog.text
    # Fewer iterations than log_every_n_steps, and no validation loader: Lightning warns of both.
    # What earlier tests left to the collector is not this run's.
    own = [str(w.message) for w in recwarn if w.category is not ResourceWarning]
    assert own == ["the number of training batches is odd"]
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"iteration {i}/3" for i in range(4)]
    assert "held-out reward" in lines[0]
    assert "reward" in lines[1]
    assert "tok/s" in lines[1]
    evaluated = ["held-out reward" in line for line in lines]
    assert evaluated == [True, False, True, True]  # where there was an evaluation, and only there
    for noise in ("v_num", "FLOPs", "it/s", "Sanity"):
        assert noise not in out + told
    directory = tmp_path / "lightning_logs" / "version_0"
    summary = json.loads((directory / "summary.json").read_text())
    reward = [f"{summary[name]:.3g}" for name in ("reward_before", "reward_after")]
    assert f"3 iterations, accuracy {summary['accuracy_before']:.3g} → " in told
    assert f"held-out reward {reward[0]} → {reward[1]}" in told
    assert f"Results are in {directory}: " in told
    for file in ("curves.png", "metrics.jsonl", "summary.json"):
        assert file in told
        assert (directory / file).stat().st_size > 0
    size = get_human_readable_count(sum(p.numel() for p in module.parameters()))
    assert f"{size} parameters, {size} of them trained; " in told


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar_in_terms_of_rl(tiny_model, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    script(tmp_path).fit(grpo(tiny_model), small(evaluation={"success_reward": 2.0}))
    bar = terminal.getvalue()
    assert "3/3" in bar
    assert "stage=generate" in bar
    assert "held-out reward=" in bar
    assert "v_num" not in bar
    assert "iteration 1/3" not in bar
    assert "accuracy" not in bar  # which no rollout can reach here


@pytest.mark.slow
def test_what_a_script_chose_itself_stays(tiny_model, tmp_path):
    chosen = [RunReport(), LearningAlarms(window=2), RichProgressBar(leave=True)]
    own = script(tmp_path, *chosen, logger=False)
    own.fit(grpo(tiny_model), small(iterations_per_epoch=1))
    kinds = (RunReport, LearningAlarms, ProgressBar)
    assert [c for c in own.callbacks if isinstance(c, kinds)] == chosen
    # Switched off stays off, and a second fit adds nothing.
    plain = trainer_of(tmp_path, [WeightSync()])
    plain.fit(grpo(tiny_model), small(iterations_per_epoch=1))
    plain.fit_loop.max_epochs = 2
    plain.fit(grpo(tiny_model), small(iterations_per_epoch=1))
    kinds = [type(c) for c in plain.callbacks]
    assert kinds.count(RunReport) == kinds.count(LearningAlarms) == 1
    assert RLProgressBar not in kinds
    assert ParameterSummary not in kinds


def test_supervised_training_writes_lines_too(tiny_model, tmp_path, capfd):
    rows = [{"prompt": f"{n}=", "completion": "7"} for n in range(100, 140)]
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=tmp_path, max_epochs=1,
        enable_checkpointing=False, log_every_n_steps=2, callbacks=[TQDMProgressBar()],
    )  # fmt: skip
    trainer.fit(
        SFTModule(str(tiny_model), optimizer=adamw(1e-3)),
        SFTDataModule(IterablePrompts(rows), batch_size=8),
    )
    out, _ = capfd.readouterr()
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"iteration {n}/5" for n in range(1, 6)]
    assert all(re.search(r": sft/loss [\d.]{1,6}, [\d.e+-]+ s$", line) for line in lines), lines
    assert "v_num" not in out


# -------------------------------------------------------------------- alarms


def alarms_of(tiny_model, tmp_path, caplog, module=None, **options) -> list[str]:
    """Return the kinds that went off in a run, each of which must have been said once."""
    caplog.clear()
    rows = [{"prompt": f"{n}="} for n in range(100, 200)]
    data = data_module(
        train_prompts=IterablePrompts(rows, seed=1), iterations_per_epoch=12,
        evaluation={"prompts": IterablePrompts(rows[:64]), "success_reward": 2.0}, **options,
    )  # fmt: skip
    trainer = trainer_of(tmp_path, [WeightSync(), Evaluate(4)])
    trainer.fit(module or grpo(tiny_model), data)
    [alarms] = [c for c in trainer.callbacks if isinstance(c, LearningAlarms)]
    said = [r.getMessage() for r in caplog.records if "LearningAlarms" in r.getMessage()]
    assert [text.split("(")[1].split(")")[0] for text in said] == list(alarms.told)
    return said


@pytest.mark.slow
def test_a_run_that_learns_is_left_alone(tiny_model, tmp_path, caplog):
    [solved] = alarms_of(tiny_model, tmp_path, caplog)  # nothing is left to learn by then
    assert "(learning)" in solved
    assert "every reward is 1 (" in solved


@pytest.mark.slow
def test_a_policy_that_gets_worse_is_told_of_by_value_bound_and_what_to_try(
    tiny_model, tmp_path, caplog
):
    def unlearn(parameters):
        return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0, maximize=True)

    def low_digits(completions, completion_ids, **columns):
        pairs = zip(completions, completion_ids, strict=True)
        return [sum(c in "01234" for c in text) / len(ids) for text, ids in pairs]

    module = grpo(tiny_model, optimizer=unlearn)
    said = alarms_of(
        tiny_model, tmp_path, caplog, module, rewards=[low_digits], groups_per_iteration=16
    )
    assert len(said) == 2
    rewards, evaluation = sorted(said, reverse=True)
    assert "(rewards)" in rewards
    assert "(evaluation)" in evaluation
    assert "eval/reward_mean of 64 prompts is " in evaluation
    assert "the mean reward of the last 3 iterations is " in rewards
    for text in said:
        assert "bound" in text
        assert "lower the learning rate" in text


@pytest.mark.slow
def test_a_policy_that_only_repeats_itself_is_told_of(tiny_model, tmp_path, caplog):
    # What is learned pays little, and some prompts show that there is more to be had.
    def trap(prompts, completions, **columns):
        pairs = zip(prompts, completions, strict=True)
        return [3.0 if p.startswith("15") else 0.1 * c.count("5") for p, c in pairs]

    module = grpo(tiny_model, optimizer=adamw(5e-2))
    said = alarms_of(tiny_model, tmp_path, caplog, module, rewards=[trap])
    assert any("(entropy)" in text and "model.entropy" in text for text in said), said


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["policy/loss", "policy/nonfinite_skipped"])
def test_numbers_that_are_none_are_told_of(tiny_model, tmp_path, caplog, metric):
    class Spoil(RunReport):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            pl_module.record({metric: float("nan") if metric == "policy/loss" else 2.0})

    trainer = trainer_of(tmp_path, [WeightSync(), Spoil()])
    trainer.fit(grpo(tiny_model), small(iterations_per_epoch=2))
    said = [r.getMessage() for r in caplog.records if "LearningAlarms" in r.getMessage()]
    assert len(said) == 1
    assert f"{metric} is " in said[0]
