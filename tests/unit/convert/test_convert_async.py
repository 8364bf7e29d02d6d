"""Test AsyncGRPOConfig of TRL: what is learned from it, and how far ahead it is written."""

import pytest

from lightning_rl.convert.python_trl import read_trl_script
from lightning_rl.convert.trainers_trl import trainer_of
from lightning_rl.convert.trl import convert_trl
from lightning_rl.errors import ConfigError


def parts(result):
    """Return the arguments of model and data."""
    return result.config["model"]["init_args"], result.config["data"]["init_args"]


def test_a_script_that_starts_the_asynchronous_trainer():
    """A step is of 4 x 8 completions, which are 4 groups of 8."""
    text = """
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
args = AsyncGRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=4, max_steps=50,
    max_staleness=2, max_inflight_tasks=40, weight_sync_steps=2, token_budget=9000, queue_maxsize=7)
AsyncGRPOTrainer("a/small", args=args)
"""
    read = read_trl_script(text, "train.py")
    result = convert_trl(read.values, trainer=read.trainer)
    model, data = parts(result)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    assert model["loss"] == {"class_path": "PPOClip", "init_args": clip}
    assert model["aggregation"] == {"class_path": "TokenMean"}
    spread = {"normalize_std": True, "eps": 1e-8}
    assert model["advantage"] == {"class_path": "GRPO", "init_args": spread}
    assert model["update"]["use_rollout_logprobs"] is True
    assert model["update"]["max_tokens_per_micro_batch"] == 9000
    assert (data["group_size"], data["groups_per_iteration"]) == (8, 4)
    assert (data["iterations_per_epoch"], data["sampling"]["max_tokens"]) == (50, 2048)
    ahead = {"max_staleness": 2, "abort_stale": True, "max_groups_in_flight": 5}
    assert data["collector"] == {"class_path": "AsyncCollector", "init_args": ahead}
    assert data["engine"]["class_path"] == "VLLMServer"
    assert data["engine"]["init_args"]["urls"] == ["http://localhost:8000"]
    schedule = {"class_path": "FixedSchedule", "init_args": {"every_n_iterations": 2}}
    assert result.config["trainer"]["callbacks"][0]["init_args"] == {"schedule": schedule}
    assert "lr_scheduler" not in model  # it is constant
    assert [item.key for item in result.left] == ["queue_maxsize"]
    assert any("mean of the micro-batches' means" in line for line in result.remarks)


def test_its_options_tell_it_from_a_grpo_config():
    ahead = convert_trl({"max_staleness": 3})
    assert parts(ahead)[1]["collector"]["init_args"]["max_staleness"] == 3
    assert "collector" not in parts(convert_trl({"num_generations": 8}))[1]


@pytest.mark.parametrize("name", ["AsyncDistillationTrainer", "SDPOTrainer", "SDFTTrainer"])
def test_trainers_of_a_name_that_holds_anothers_are_refused(name):
    with pytest.raises(ConfigError, match=rf"^{trainer_of(name)}: convert reads .*asyncgrpo"):
        convert_trl({"num_generations": 8}, trainer=trainer_of(name))
    assert trainer_of(name) == name.removesuffix("Trainer").lower()
