"""Test that check and fit take what convert writes."""

import json

import pytest
import yaml

from lightning_rl.cli import main

TRL = {
    "defaults": {"max_steps": 8},
    "cispo": {
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "use_vllm": True,
        "vllm_max_model_length": 64,
        "max_steps": 8,
        "beta": 0.01,
        "entropy_coef": 0.001,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.25,
        "save_steps": 2,
        "log_completions": True,
        "max_completion_length": 8,
    },
    "lora": {
        "use_peft": True,
        "beta": 0.01,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 8,
        "report_to": ["tensorboard"],
    },
    "distillation": {"teacher_model_name_or_path": "teacher", "top_p": 0.9, "max_steps": 8},
}
VERL = {
    "ppo": ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"],
    "grpo": [
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.filter_groups.enable=true",
        "algorithm.rollout_correction.rollout_is=sequence",
        "trainer.total_training_steps=8",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    ],
    "bypass": [  # of groups of one
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.rollout_is=token",
    ],
    "teacher": [
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "distillation.enabled=true",
        "distillation.distillation_loss.loss_mode=k1",
        "distillation.distillation_loss.use_policy_gradient=true",
        "distillation.teacher_models.teacher_model.model_path=teacher",
    ],
}


@pytest.fixture
def convert(tiny_model, tmp_path, monkeypatch, capsys):
    """Write a configuration of theirs, convert it, and return where ours is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    row = {"prompt": "312=", "answer": "123"}
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    (tmp_path / "teacher").symlink_to(tiny_model)

    def run(theirs):
        (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
        options = ["--model", str(tiny_model), "--prompts", "prompts.jsonl"]
        options += ["--eval_prompts", "prompts.jsonl"]
        options += ["--rewards", "recipes.sort_digits.reward.exact_match"]
        assert main(["convert", "theirs.yaml", *options, "--output", "ours.yaml"]) == 0
        capsys.readouterr()
        return "ours.yaml"

    return run


@pytest.mark.parametrize("theirs", [*TRL.values(), *VERL.values()], ids=[*TRL, *VERL])
def test_check_takes_what_convert_writes(convert, theirs, capsys):
    ours = convert(theirs)
    status = main(["check", "--config", ours, "--no_rollout"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "configuration: good" in printed.out


def test_fit_runs_it(convert, tmp_path):
    theirs = {
        "max_steps": 2,
        "max_completion_length": 4,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "bf16": False,
        "output_dir": "out",
        "learning_rate": "1e-3",
    }
    assert main(["fit", "--config", convert(theirs)]) == 0
    (summary,) = (tmp_path / "out").rglob("summary.json")
    assert json.loads(summary.read_text())["iterations"] == 2


ROWS = {
    "sft": {"prompt": "312=", "completion": "123"},
    "dpo": {"prompt": "312=", "chosen": "123", "rejected": "321"},
    "kto": {"prompt": "312=", "completion": "123", "label": True},
    "reward": {"prompt": "312=", "chosen": "123", "rejected": "321"},
}


@pytest.mark.parametrize("trainer", ROWS)
def test_what_is_learned_from_rows_is_fitted_as_trl_counts_it(
    trainer, tiny_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROWS[trainer])}\n" * 16)
    values = {
        "model_name_or_path": str(tiny_model),
        "dataset_name": "rows.jsonl",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,  # of which an epoch has four
        "warmup_ratio": 0.5,
        "learning_rate": 1e-3,
        "max_length": 16,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "bf16": False,
        "use_cpu": True,
        "output_dir": "out",
    }
    (tmp_path / f"{trainer}.yaml").write_text(yaml.safe_dump(values))
    said = ["--eval_prompts", "rows.jsonl", "--output", "ours.yaml"]
    assert main(["convert", f"{trainer}.yaml", *said]) == 0
    assert main(["check", "--config", "ours.yaml", "--no_rollout"]) == 0
    assert "configuration: good" in capsys.readouterr().out
    assert main(["fit", "--config", "ours.yaml"]) == 0
    (summary,) = (tmp_path / "out").rglob("summary.json")
    assert json.loads(summary.read_text())["iterations"] == 6
    lines = (summary.parent / "metrics.jsonl").read_text().splitlines()
    validated = [row for row in map(json.loads, lines) if any("val_loss" in key for key in row)]
    assert [row["iteration"] for row in validated] == [3, 6]
