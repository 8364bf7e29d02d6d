"""Test Distillation as TRL and verl configure it: the teacher, and what is learned from it."""

from pathlib import Path

import pytest

from lightning_rl.convert.python_trl import read_trl_script
from lightning_rl.convert.shell import Word
from lightning_rl.convert.sources import from_command
from lightning_rl.convert.trl import convert_trl
from lightning_rl.convert.verl import convert_verl
from lightning_rl.errors import ConfigError


def parts(result):
    """Return the arguments of model and data."""
    return result.config["model"]["init_args"], result.config["data"]["init_args"]


def test_the_distillation_trainer_of_trl():
    """A batch is 2 x 4 completions of as many prompts, of which one optimizer step is made."""
    command = (
        "trl distillation --model_name_or_path a/small --teacher_model_name_or_path a/large "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --dtype bfloat16 "
        "--teacher_model_revision v2 --trust_remote_code --top_p 0.9 --epsilon 0.1"
    )
    words = [Word(word) for word in command.split()]
    result = convert_trl(from_command(words, Path()).values)
    model, data = parts(result)
    assert model["loss"] == {"class_path": "TeacherDivergence", "init_args": {"beta": 1.0}}
    assert model["advantage"] == {"class_path": "Distillation"}
    assert (data["group_size"], data["groups_per_iteration"]) == (1, 8)
    assert model["update"]["minibatches"] == 1
    [teacher] = data["rewards"]
    assert teacher == {
        "class_path": "lightning_rl.ModelTeacher",
        "init_args": {"model": "a/large", "top_k": 16, "dtype": "bfloat16",
                      "trust_remote_code": True, "model_kwargs": {"revision": "v2"}},
    }  # fmt: skip
    assert "top_p" not in data["sampling"]  # of which a divergence would be refused
    assert {"beta", "top_p", "epsilon"} <= {item.key for item in result.left}
    assert not any("reward functions" in line for line in result.missing)


def test_the_older_trainers_of_trl_have_their_own_defaults():
    result = convert_trl({"teacher_model_name_or_path": "a/b", "lmbda": 0.5, "seq_kd": True})
    model, data = parts(result)
    assert model["loss"]["init_args"] == {"beta": 0.5}
    assert model["optimizer"]["init_args"]["lr"] == 2e-5
    assert data["sampling"] == {"max_tokens": 128, "temperature": 0.9}
    left = {item.key: item.reason for item in result.left}
    assert "each completion is the policy's" in left["lmbda"]
    assert "distributions at temperature 1" in left["temperature"]
    assert "seq_kd" in left
    uld = {"use_uld_loss": True, "uld_skip_student_eos": False}
    gold = convert_trl({"teacher_model_name_or_path": "a/b", "beta": 0.0, **uld})
    assert parts(gold)[0]["loss"]["init_args"] == {"beta": 0.0}
    assert parts(gold)[0]["optimizer"]["init_args"]["lr"] == 1e-7
    # The default is 0.95, and a divergence needs all tokens.
    assert {"top_p", *uld} <= {item.key for item in gold.left}
    with pytest.raises(ConfigError, match=r"refused: TeacherDivergence\(beta=1.5\)"):
        convert_trl({"teacher_model_name_or_path": "a/b", "beta": 1.5})


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, 8), (1.0, 16)])
def test_a_served_teacher_of_trl(beta, top_k):
    values = {"teacher_model_server_url": "http://host:8000/", "loss_top_k": 8, "beta": beta,
              "reward_funcs": ["a.b"]}  # fmt: skip
    result = convert_trl(values)
    [teacher] = parts(result)[1]["rewards"]
    served = {"base_url": "http://host:8000/v1", "model": "TEACHER", "top_k": top_k}
    assert teacher == {"class_path": "lightning_rl.ServedTeacher", "init_args": served}
    assert any("for TEACHER" in line for line in result.missing)
    left = {item.key: item.reason for item in result.left}
    assert ("beta" in left) == (beta == 1)
    assert "has no rewards" in left["reward_funcs"]


def test_a_script_that_starts_a_distillation_trainer():
    text = """
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDConfig, GKDTrainer
teacher = AutoModelForCausalLM.from_pretrained("a/large", dtype="bfloat16", device_map="auto")
GKDTrainer("a/small", teacher, args=GKDConfig(max_new_tokens=32, lmbda=1.0, temperature=1.0))
"""
    result = convert_trl(read_trl_script(text, "gkd.py").values)
    model, data = parts(result)
    assert (model["model"], data["sampling"]["max_tokens"]) == ("a/small", 32)
    [teacher] = data["rewards"]
    assert teacher["init_args"] == {"model": "a/large", "top_k": 16, "dtype": "bfloat16"}
    left = {item.key for item in result.left}
    assert left == {"beta", "lmbda", "teacher_model_init_kwargs.device_map"}


def test_models_that_judge_may_be_on_another_machine():
    """Their directories were looked for here, and the conversion refused without them."""
    there = "/another/machines/model"
    [reward] = parts(convert_trl({"reward_model_name_or_path": there}))[1]["rewards"]
    [teacher] = parts(convert_trl({"teacher_model_name_or_path": there}))[1]["rewards"]
    assert reward["init_args"]["model"] == teacher["init_args"]["model"] == there


LOSS, ACTOR = "distillation.distillation_loss.", "actor_rollout_ref.actor."
VERL = {
    "distillation.enabled": True,
    "distillation.teacher_models.teacher_model.model_path": "a/b",
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 4,
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
}
GRPO = {"class_path": "GRPO", "init_args": {"normalize_std": True, "eps": 1e-6}}
CLIP = {"class_path": "PPOClip", "init_args": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}}
ALONE = {LOSS + "use_task_rewards": False}
AS_REWARD = {LOSS + "loss_mode": "k1", LOSS + "use_policy_gradient": True}


def told(result):
    return {item.key for item in result.left}


@pytest.mark.parametrize(
    ("said", "name", "arguments"),
    [
        ({}, "K3Penalty", {"coef": 2.0, "cap": 10.0}),
        ({LOSS + "loss_max_clamp": 5.0}, "K3Penalty", {"coef": 2.0, "cap": 5.0}),
        ({LOSS + "loss_mode": "mse"}, "K2Penalty", {"coef": 2.0}),
    ],
)
def test_an_estimate_of_verl_beside_rewards_is_a_penalty(said, name, arguments):
    """The teacher is the reference, which the trainer scores as verl's engine does."""
    result = convert_verl(VERL | {LOSS + "distillation_loss_coef": 2.0} | said, ["a.b"])
    model, data = parts(result)
    assert model["kl"] == {"class_path": name, "init_args": arguments}
    assert model["reference"] == {"class_path": "FrozenReference", "init_args": {"model": "a/b"}}
    assert (model["advantage"], data["rewards"]) == (GRPO, ["a.b"])
    assert told(result) == set()


def test_the_advantage_of_verls_teacher_is_added_to_that_of_rewards():
    coef = {LOSS + "distillation_loss_coef": 0.5}
    result = convert_verl(VERL | AS_REWARD | coef, ["a.b"])
    model, data = parts(result)
    assert model["advantage"] == {
        "class_path": "Distillation", "init_args": {"coef": 0.5, "base_advantage": GRPO},
    }  # fmt: skip
    judge, teacher = data["rewards"]
    assert (judge, teacher["init_args"]) == ("a.b", {"model": "a/b", "dtype": "bfloat16"})
    assert data["reward_weights"] == [1.0, 0.0]
    assert told(result) == set()
    twice = convert_verl(VERL | AS_REWARD | {ACTOR + "ppo_epochs": 2}, ["a.b"])
    assert told(twice) == {LOSS + "use_policy_gradient"}
    other = convert_verl(VERL | AS_REWARD | {LOSS + "loss_mode": "k3"}, ["a.b"])
    assert told(other) == {LOSS + "loss_mode"}
    # Nothing can stand beside an advantage by critics: its loss is beside the teacher's.
    critic = convert_verl(VERL | AS_REWARD | coef | {"algorithm.adv_estimator": "gae"}, ["a.b"])
    assert parts(critic)[0]["loss"]["init_args"] == {"beta": 1.0, "coef": 0.5, "base_loss": CLIP}
    assert told(critic) == {LOSS + "loss_mode"}


@pytest.mark.parametrize(
    ("said", "loss", "arguments"),
    [
        (AS_REWARD | {LOSS + "clip_ratio_high": 0.3}, "PPOClip",
         {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}),
        ({LOSS + "loss_mode": "forward_kl_topk", LOSS + "topk": 8}, "TeacherDivergence",
         {"beta": 0.0, "coef": 1.0}),
        ({LOSS + "loss_mode": "k2"}, "TeacherDivergence", {"beta": 1.0, "coef": 1.0}),
    ],
)  # fmt: skip
def test_a_teacher_of_verl_alone_needs_no_rewards_and_no_critic(said, loss, arguments):
    values = VERL | ALONE | {"algorithm.adv_estimator": "gae"} | said
    result = convert_verl(values)
    model, data = parts(result)
    assert model["loss"] == {"class_path": loss, "init_args": arguments}
    assert (model["advantage"]["class_path"], "critic" in model) == ("Distillation", False)
    [teacher] = data["rewards"]
    top_k = {} if loss == "PPOClip" else {"top_k": said.get(LOSS + "topk", 32)}
    assert teacher["init_args"] == {"model": "a/b", "dtype": "bfloat16"} | top_k
    assert "reward_weights" not in data
    assert not any("reward functions" in line for line in result.missing)


def test_what_verl_tells_of_several_teachers_and_their_gpus():
    models = "distillation.teacher_models."
    values = VERL | {
        models + "one.model_path": "a/c", models + "one.key": "x", "distillation.nnodes": 1,
        models + "teacher_model.inference.max_model_len": 99, ACTOR + "use_kl_loss": True,
        "actor_rollout_ref.rollout.temperature": 0.7,
    }  # fmt: skip
    result = convert_verl(values, ["a.b"])
    [several] = [line for line in result.missing if "set of prompts" in line]
    assert several.startswith("data.rewards: one are teachers")
    assert "left out: distillation.nnodes, " in result.remarks[-1]
    # The reference is the initial model's then, and so the teacher cannot be one.
    model, _ = parts(result)
    assert "reference" not in model
    assert model["loss"]["init_args"]["base_loss"] == CLIP
    assert {LOSS + "loss_mode", "actor_rollout_ref.rollout.temperature"} <= told(result)
