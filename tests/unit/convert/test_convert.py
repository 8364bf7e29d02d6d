"""Test tables of counterparts against our classes, and configurations of TRL as ours."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonargparse._parameter_resolvers import get_signature_parameters
from lightning.pytorch import Trainer

from lightning_rl import PolicyModule, RLDataModule
from lightning_rl.config.names import MODULE_OF, public
from lightning_rl.convert.main import as_yaml, main
from lightning_rl.convert.prime_rl import PRIME_RL
from lightning_rl.convert.supervised_trl import SECTIONS
from lightning_rl.convert.trl import TRL, convert_trl
from lightning_rl.convert.verl import VERL, convert_verl
from lightning_rl.errors import ConfigError
from tests.unit.convert import counterpart_tables
from tests.unit.convert.vanishing import as_written, vanished

GRPO_CONFIG = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval
max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta
num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos
vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level
reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold
use_bias_correction_kl log_completions log_multimodal num_completions_to_print
log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
"""
"""The fields of GRPOConfig in TRL 1.16."""
ASYNC_GRPO_CONFIG = """
model_init_kwargs dtype trust_remote_code router_aux_loss_coef learning_rate logging_steps
lr_scheduler_type num_generations max_completion_length temperature top_p top_k min_p
repetition_penalty chat_template_kwargs max_tool_calling_iterations fork_threshold_tokens
vllm_server_base_url vllm_server_timeout request_timeout weight_sync_timeout epsilon epsilon_high
token_budget max_inflight_tasks max_staleness queue_maxsize weight_sync_steps
heartbeat_stale_after_s ignore_data_skip log_completions num_completions_to_print
"""
"""The fields of AsyncGRPOConfig in TRL 1.16."""
PLACES = {"model": PolicyModule, "data": RLDataModule, "trainer": Trainer}


def is_ours(name: str) -> bool:
    """Tell whether ``name``, as tables have it, is an argument or a public class."""
    place, _, argument = name.partition(".")
    if not argument:
        return place == "seed_everything" or place in MODULE_OF
    owner = PLACES.get(place) or public(place)
    # A class hands on to its bases what it does not name, as the parser of configurations knows.
    return argument in {parameter.name for parameter in get_signature_parameters(owner)}


@pytest.mark.parametrize(
    "row",
    [
        *(*TRL.values(), *VERL.values(), *PRIME_RL.values()),
        *(row for rows in SECTIONS.values() for row in rows),
    ],
    ids=lambda row: row.theirs,
)
def test_each_counterpart_exists(row):
    names = [name for name in row.ours.split(", ") if name]
    assert [name for name in names if not is_ours(name)] == []
    assert names or row.note, "no counterpart, and no reason"
    for code in re.findall(r"`([A-Z]\w+)", row.note):  # classes, ours or Lightning's
        assert code in MODULE_OF or code in (
            "ModelParallelStrategy",
            "ModelCheckpoint",
            "TensorBoardLogger",
            "WandbLogger",
            "VerifiersPrompts",
            "VerifiersAgent",
        ), code


def test_every_field_of_both_grpo_configs_has_a_row():
    names = [*GRPO_CONFIG.split(), *ASYNC_GRPO_CONFIG.split()]
    assert [name for name in names if name not in TRL] == []


@pytest.mark.parametrize("name", counterpart_tables.LIBRARIES)
def test_the_pages_show_the_tables(name):
    page = (Path(__file__).parents[3] / "docs" / "convert" / f"{name}.md").read_text(
        encoding="utf-8"
    )
    # If not: python -m tests.unit.convert.counterpart_tables
    assert counterpart_tables.page(page, name) == page


# One that differs from the default where doubling it or turning it around does not do.
OTHER = {
    "adam_beta1": 0.8, "adam_beta2": 0.9, "bf16": False, "dataset_name": "a/hub",
    "dtype": "bfloat16", "num_generations": 4, "reward_weights": [0.5], "greater_is_better": False,
    "eval_strategy": "steps", "fp16": True, "importance_sampling_level": "sequence",
    "loss_type": "grpo", "lr_scheduler_type": "cosine", "max_steps": 64, "model_name_or_path": "m",
    "multi_objective_aggregation": "normalize_then_sum", "optim": "sgd", "pad_to_multiple_of": 8,
    "report_to": "wandb", "reward_funcs": ["a.b"], "save_strategy": "no", "scale_rewards": "none",
    "top_k": 5, "vllm_importance_sampling_clip_max": 5.0, "run_name": "run",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_mode": "server", "vllm_model_impl": "transformers", "generation_kwargs": {"stop": "x"},
    "accelerator_config": {"split_batches": True},
    "steps_per_generation": 4, "generation_batch_size": 32, "lora_target_modules": ["q_proj"],
    "num_completions_to_print": 3, "max_tool_calling_iterations": 3,
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "gradient_accumulation_steps": 4,
    "model_init_kwargs": {"subfolder": "v2"}, "chat_template_kwargs": {"enable_thinking": False},
    "lora_modules_to_save": ["norm"], "teacher_model_init_kwargs": {"subfolder": "v2"},
}  # fmt: skip
# Parameters that mean nothing without another.
BESIDE = {
    "epsilon_high": {"epsilon_high": 0.3},
    "lora": {"use_peft": True},
    "use_rslora": {"use_peft": True},
    "use_dora": {"use_peft": True},
    "sapo": {"loss_type": "sapo"},
    "entropy_": {"use_adaptive_entropy": True},
    "vespo": {"loss_type": "vespo"},
    "vllm_": {"use_vllm": True},
    "vllm_server": {"use_vllm": True, "vllm_mode": "server"},
    "vllm_importance_sampling_cap": {
        "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"
    },
    "use_bias_correction_kl": {"beta": 0.1},
    "sync_ref_model": {"beta": 0.1},
    "ref_model": {"beta": 0.1, "sync_ref_model": True},
    "eval_steps": {"eval_strategy": "steps", "eval_steps": 7},
    "num_train_epochs": {"max_steps": -1},
    "eval_on_start": {"eval_strategy": "steps", "eval_steps": 7},
    "num_generations_eval": {"eval_strategy": "steps", "eval_steps": 7},
    "dataset_test_split": {"eval_strategy": "steps", "eval_steps": 7},
    "num_completions_to_print": {"log_completions": True},
    "greater_is_better": {"metric_for_best_model": "reward"},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "run_name": {"report_to": "tensorboard"},
    "gradient_accumulation_steps": {"steps_per_generation": 32},
    "teacher_model_revision": {"teacher_model_name_or_path": "a/b"},
    "teacher_model_init": {"teacher_model_name_or_path": "a/b"},
    "loss_": {"teacher_model_server_url": "http://a:1", "beta": 0.0},
}  # fmt: skip
START = {"max_steps": 100, "save_steps": 10, "bf16": True}


def beside(name: str) -> dict:
    found = [values for prefix, values in BESIDE.items() if name.startswith(prefix)]
    return START | (found[-1] if found else {})


def another(name: str):
    value = beside(name).get(name, TRL[name].default)
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 if value else 0.25
    if TRL[name].kind == "flag":
        return True
    whole = TRL[name].kind.startswith("integer") or "max" in name or "steps" in name
    return f"other_{name}" if isinstance(value, str) else 16 if whole else 0.5


@pytest.mark.parametrize("name", TRL)
def test_no_parameter_is_dropped_in_silence(name):
    for start in (beside(name), START, {}):  # that enables it, and that does not
        values = (as_written(TRL[name]), another(name))
        assert vanished(convert_trl, start, name, values) == []
    if not TRL[name].ours:
        after = convert_trl({name: another(name)})
        assert any(item.key == name and item.reason for item in after.left)


def part(values, path):
    at = convert_trl(values).config
    for name in path.split("."):
        at = at.get("init_args", at)[name]
    return at


def test_what_changes_the_model_and_the_sampling_is_carried_over():
    values = {
        "trust_remote_code": True, "cast_lm_head_to_fp32": True, "model_revision": "v2",
        "model_init_kwargs": {"dtype": "bfloat16", "subfolder": "x"}, "use_peft": True,
        "use_rslora": True, "lora_modules_to_save": ["norm"], "min_p": 0.05,
        "repetition_penalty": 1.1, "chat_template_kwargs": '{"enable_thinking": false}',
        "generation_kwargs": {"frequency_penalty": 0.2},
    }  # fmt: skip
    for path, value in {
        "model.loading.trust_remote_code": True,
        "model.loading.cast_lm_head_to_fp32": True,
        "model.loading.model_kwargs": {"subfolder": "x", "revision": "v2"},
        "model.lora.options": {"use_rslora": True, "modules_to_save": ["norm"]},
        "data.sampling.min_p": 0.05,
        "data.sampling.repetition_penalty": 1.1,
        "data.sampling.frequency_penalty": 0.2,
        "data.chat_template_kwargs": {"enable_thinking": False},
    }.items():
        assert part(values, path) == value
    [left] = [item for item in convert_trl(values).left if "init_kwargs" in item.key]
    assert (left.key, left.value) == ("model_init_kwargs.dtype", "bfloat16")
    assert "trainer.precision" in left.reason


def test_batches_are_counted_as_trl_counts_them():
    # 2 processes x 4 completions x 8 micro-batches = 64 completions, 8 groups of 8; the optimizer
    # steps after every 4 micro-batches, so 2 minibatches; twice: 4 steps an iteration.
    values = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "num_iterations": 2,
        "max_steps": 100,
    }
    result = convert_trl(values, devices=2).config
    data, model = result["data"]["init_args"], result["model"]["init_args"]
    assert (data["groups_per_iteration"], data["group_size"]) == (8, 8)
    assert (model["update"]["minibatches"], model["update"]["ppo_epochs"]) == (2, 2)
    assert data["iterations_per_epoch"] == 25
    assert model["lr_scheduler"]["init_args"] == {"warmup_steps": 0, "total_steps": 100}
    with pytest.raises(ConfigError, match="12 completions per iteration do not divide into groups"):
        convert_trl({"per_device_train_batch_size": 12})


def test_numbers_that_mean_something_else_are_changed_and_said():
    result = convert_trl({"loss_type": "cispo", "epsilon_high": 5.0})
    assert part({"loss_type": "cispo", "epsilon_high": 5.0}, "model.loss") == {
        "class_path": "CISPO",
        "init_args": {"clip_low": 1.0, "clip_high": 4.0},
    }
    assert any("epsilon_high 5 bounds the ratio" in remark for remark in result.remarks)
    assert part({}, "model.advantage.eps") == 1e-4
    assert part({"scale_rewards": False}, "model.advantage.normalize_std") is False
    assert part({"delta": 4.0}, "model.loss.dual_clip") == 4.0
    assert part({"top_k": -1}, "data.sampling").get("top_k") == 0
    assert part({"learning_rate": "2e-6"}, "model.optimizer.lr") == 2e-6
    (left,) = convert_trl({"loss_type": "cispo"}).left  # its epsilon_high is epsilon: 0.2
    assert (left.key, "every weight would be cut" in left.reason) == ("epsilon_high", True)


def test_weights_stay_with_their_rewards():
    values = {"reward_funcs": ["think_format_reward", "a.b", "c.d"], "reward_weights": [1, 2, 3]}
    data = convert_trl(values).config["data"]["init_args"]
    assert (data["rewards"], data["reward_weights"]) == (["a.b", "c.d"], [2, 3])


def test_what_is_on_by_default_is_reported_too():
    left = [item.key for item in convert_trl({"use_peft": True}).left]
    assert left == ["lora_target_modules", "lora_dropout"]


def test_corrections_are_those_of_trl():
    def correction(**values):
        return part({"use_vllm": True} | values, "model.correction")

    assert correction() == {"class_path": "SequenceMIS", "init_args": {"low": 0.0, "high": 3.0}}
    values = {"vllm_importance_sampling_mode": "token_truncate"}
    assert correction(**values) == {"class_path": "TokenTIS", "init_args": {"cap": 3.0}}
    assert "correction" not in convert_trl({}).config["model"]["init_args"]


def test_a_full_dump_reports_only_what_was_set(tmp_path, capsys):
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir="out", use_cpu=True, ddp_bucket_cap_mb=25)
    (tmp_path / "grpo.json").write_text(json.dumps(arguments.to_dict(), default=str))
    assert main([str(tmp_path / "grpo.json"), "--output", str(tmp_path / "ours.yaml")]) == 0
    said = capsys.readouterr().err
    # But for the one that was set: what GRPOConfig has otherwise than its base, and use_cpu's.
    assert set(re.findall(r"^- (\w+)=", said, re.MULTILINE)) == {
        "ddp_bucket_cap_mb",
        "dataloader_pin_memory",
        "logging_steps",
        "remove_unused_columns",
    }
    written = (tmp_path / "ours.yaml").read_text()
    assert "# - ddp_bucket_cap_mb=" in written
    assert yaml.safe_load(written)["trainer"]["accelerator"] == "cpu"


def test_held_out_prompts_of_the_command_line_are_kept_without_evaluations(tmp_path, capsys):
    (tmp_path / "grpo.yaml").write_text("eval_strategy: no\n")
    assert main([str(tmp_path / "grpo.yaml"), "--eval_prompts", "held.jsonl"]) == 0
    printed = capsys.readouterr()
    ours = yaml.safe_load(printed.out)
    assert ours["data"]["init_args"]["evaluation"]["prompts"]["init_args"]["path"] == "held.jsonl"
    assert "Evaluate" not in [c["class_path"] for c in ours["trainer"]["callbacks"]]
    assert "lightning-rl validate" in printed.err


def test_data_of_the_hub_and_reward_models():
    values = {
        "dataset_name": "openai/gsm8k", "dataset_config": "main", "max_prompt_length": 64,
        "eval_strategy": "steps", "eval_steps": 4, "reward_model_name_or_path": "a/b",
        "reward_funcs": ["org/Reward-1.5B", "get_soft_overlong_punishment", "accuracy_reward"],
    }  # fmt: skip
    result = convert_trl(values)
    data = result.config["data"]["init_args"]
    of_hub = {"path": "openai/gsm8k", "name": "main"}
    assert data["train_prompts"]["init_args"] == of_hub | {"split": "train"}
    assert data["evaluation"]["prompts"]["init_args"] == of_hub | {"split": "test"}
    # TRL's own names are no import paths.
    *models, overlong = data["rewards"]
    assert [reward["init_args"]["model"] for reward in models] == ["a/b", "org/Reward-1.5B"]
    assert overlong["class_path"] == "lightning_rl.OverlongPenalty"
    assert {"reward_funcs", "max_prompt_length"} <= {item.key for item in result.left}


def test_a_hostile_value_stays_in_its_comment():
    text = as_yaml(
        convert_trl({"hub_model_id": "a\nmodel: {class_path: os.system}\u2028b"}), "x\ny"
    )
    assert all(
        line.startswith("#") for line in text.splitlines() if "os.system" in line or "x y" in line
    )
    assert set(yaml.safe_load(text)) == {"seed_everything", "model", "data", "trainer"}


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1")
    for name, message in (
        ("training_args.bin", r"json.dump\(config.to_dict"),
        ("none.yaml", "cannot be read"),
        ("list.yaml", "holds list"),
    ):
        with pytest.raises(ConfigError, match=message):
            main([str(tmp_path / name)])


VERL_START = {
    "trainer.total_training_steps": 64,
    "trainer.test_freq": 4,
    "trainer.save_freq": 4,
    "trainer.logger": ["wandb"],
    "trainer.n_gpus_per_node": 1,
    "data.train_files": "train.parquet",
    "data.val_files": "test.parquet",
    "actor_rollout_ref.actor.entropy_coeff": 0.01,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
}
VERL_OTHER = {
    "trainer.logger": ["tensorboard"], "trainer.device": "cpu", "data.train_files": "other.parquet",
    "data.val_files": "other.parquet", "trainer.default_local_dir": "out", "data.seed": 3,
    "algorithm.adv_estimator": "grpo", "algorithm.kl_penalty": "mse", "data.shuffle": False,
    "algorithm.kl_ctrl.type": "adaptive", "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_rs": "token_k1", "trainer.rollout_data_dir": "out",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.4_3.0",
    "trainer.v1.trainer_mode": "colocate_async",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo", "critic.loss_agg_mode": "token-sum",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum", "critic.enable": True,
    "actor_rollout_ref.actor.optim.betas": [0.8, 0.9], "actor_rollout_ref.rollout.top_k": 5,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "trainer.save_freq": 5,
    "trainer.test_freq": 5, "actor_rollout_ref.model.lora_rank": 8,
    "algorithm.filter_groups.max_num_gen_batches": 2,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 4, "actor_rollout_ref.actor.clip_ratio_c": 4.0,
    "actor_rollout_ref.actor.kl_loss_type": "k1", "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.val_kwargs.top_k": 5, "actor_rollout_ref.model.path": "m",
    "actor_rollout_ref.rollout.max_model_len": 99, "data.val_max_samples": 5,
    "critic.ppo_mini_batch_size": 5, "trainer.max_actor_ckpt_to_keep": 5,
    "actor_rollout_ref.model.target_modules": ["q"], "data.prompt_key": "question",
    "actor_rollout_ref.actor.strategy": "megatron", "algorithm.filter_groups.metric": "acc",
    "algorithm.gamma": 0.9, "algorithm.lam": 0.9, "trainer.critic_warmup": 5,
    "trainer.log_val_generations": 5, "reward.reward_kwargs.max_resp_len": 256,
    "distillation.distillation_loss.loss_mode": "k2",
    "distillation.distillation_loss.loss_max_clamp": 5.0,
}  # fmt: skip
VERL_BESIDE = {
    "algorithm.rollout_correction.rollout_is": {
        "algorithm.rollout_correction.rollout_is": "sequence"
    },
    "trainer.total_epochs": {"trainer.total_training_steps": None},
    "actor_rollout_ref.rollout.val_kwargs": {
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.7
    },
    "algorithm.rollout_correction.rollout_rs": {
        "algorithm.rollout_correction.rollout_rs": "seq_sum_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.1_3.0",
    },
    "algorithm.norm": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4},
    "algorithm.filter": {
        "algorithm.filter_groups.enable": True, "actor_rollout_ref.rollout.n": 4,
    },
    "reward.reward_kwargs": {"reward.reward_kwargs.overlong_buffer_cfg.enable": True,
                             "reward.reward_kwargs.overlong_buffer_cfg.len": 64},
    "algorithm.filter_groups.max_num": {"algorithm.filter_groups.max_num_gen_batches": 2},
    "actor_rollout_ref.actor.tau": {"actor_rollout_ref.actor.policy_loss.loss_mode": "sapo"},
    "actor_rollout_ref.actor.loss_scale": {
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"
    },
    "distillation.": {"distillation.enabled": True, "algorithm.use_kl_in_reward": False,
                      "actor_rollout_ref.actor.use_kl_loss": False},
    "distillation.distillation_loss.topk": {
        "distillation.distillation_loss.loss_mode": "forward_kl_topk"
    },
    "distillation.distillation_loss.clip": {
        "distillation.distillation_loss.use_policy_gradient": True,
        "distillation.distillation_loss.use_task_rewards": False,
    },
    "distillation.teacher_models": {"distillation.distillation_loss.loss_mode": "forward_kl_topk"},
}  # fmt: skip
# Off in the result as in verl, where something else is lacking that would let it be on.
OFF_WITHOUT = (
    "algorithm.filter_groups.enable", "actor_rollout_ref.actor.optim.lr_scheduler_type",
    *("actor_rollout_ref.rollout.val_kwargs." + n for n in ("do_sample", "n", "top_k", "top_p")),
    "data.val_max_samples",
    "reward.reward_kwargs.overlong_buffer_cfg.enable",
)  # fmt: skip


def another_of_verl(name, value):
    value = value if value is not None or VERL[name].kind != "flag" else False
    other = VERL_OTHER.get(name)
    if other is None or other == value:
        other = not value if isinstance(value, bool) else value * 2 if value else 0.5
        if not isinstance(value, bool | int | float):
            other = f"other_{name}" if isinstance(value, str) else 16
    return other


@pytest.mark.parametrize("name", VERL)
def test_no_parameter_of_verl_is_dropped_in_silence(name):
    def convert(values):
        return convert_verl([f"{key}={json.dumps(value)}" for key, value in values.items()])

    enabled = dict(VERL_START)
    for prefix, values in VERL_BESIDE.items():
        enabled |= values if name.startswith(prefix) else {}
    for start in (enabled, VERL_START, {})[: 1 if name in OFF_WITHOUT else 3]:
        values = (as_written(VERL[name]), another_of_verl(name, VERL[name].default))
        assert vanished(convert, start, name, values) == []


@pytest.mark.parametrize(
    ("older", "newer"), [(0.5, None), (None, 0.5), (0.5, 1.0), (1.0, 0.5), (0.7, 0.5)]
)
def test_either_bound_that_verl_has_for_a_gradient_is_carried_over(older, newer):
    """A configuration that verl wrote has both, one of which is the default."""
    values = {"grad_clip": older, "optim.clip_grad": newer}
    said = [f"actor_rollout_ref.actor.{key}={bound}" for key, bound in values.items() if bound]
    done = convert_verl(said)
    assert done.config["model"]["init_args"]["update"]["max_grad_norm"] == 0.5
    assert [item.value for item in done.left] == [
        bound for bound in (older, newer) if bound not in (0.5, None)
    ]


def test_verl_as_hydra_keeps_it(tmp_path, capsys):
    overrides = [
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
        "actor_rollout_ref.actor.clip_ratio_low=1.0",
        "actor_rollout_ref.actor.clip_ratio_high=4.0",
        "+actor_rollout_ref.actor.optim.lr=1e-6",
        "ray_kwargs.ray_init.num_cpus=8",
    ]
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    assert main([str(tmp_path / "overrides.yaml"), "--model", "m", "--rewards", "a.b"]) == 0
    printed = capsys.readouterr()
    model = yaml.safe_load(printed.out)["model"]["init_args"]
    assert (model["model"], model["update"]["minibatches"]) == ("m", 4)
    assert model["loss"] == {
        "class_path": "CISPO",
        "init_args": {"clip_low": 1.0, "clip_high": 4.0},
    }
    assert model["optimizer"]["init_args"]["lr"] == 1e-6
    assert "ray_kwargs.ray_init.num_cpus" in printed.err
    nested = {"actor_rollout_ref": {"rollout": {"n": 5, "dtype": "${x}"}}, "data": {"seed": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(nested))
    assert main([str(tmp_path / "config.yaml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["group_size"] == 5


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ({"is": "token"}, ("TokenTIS", {"cap": 2.0})),
        ({"is": "sequence", "is_threshold": 3.0}, ("SequenceTIS", {"cap": 3.0})),
        ({"is": "token", "is_threshold": "0.5_5.0"}, ("TokenMIS", {"low": 0.5, "high": 5.0})),
        (
            {"rs": "seq_sum_k1", "rs_threshold": 4.0},
            ("SequenceMIS", {"low": 0.25, "high": 4.0, "weighted": False}),
        ),
        (  # its bounds are on 1 / w
            {"rs": "seq_mean_k1", "rs_threshold": "0.5_4.0"},
            ("GeometricMIS", {"low": 0.25, "high": 2.0, "weighted": False}),
        ),
        (
            {"rs": "token_k1", "rs_threshold": "0.5_4.0", "is": "token"},
            ("TokenMIS", {"low": 0.25, "high": 2.0, "weighted": True}),
        ),
    ],
)
def test_corrections_of_verl(said, ours):
    prefix = "algorithm.rollout_correction.rollout_"
    result = convert_verl([f"{prefix}{name}={value}" for name, value in said.items()])
    name, arguments = ours
    written = result.config["model"]["init_args"]["correction"]
    assert written == {"class_path": name, "init_args": arguments}
    told = [item.key for item in result.left if "correction" in item.key]
    assert told == ([f"{prefix}rs"] if "rs" in said else [])  # rejected tokens still count


def test_the_group_of_search_r1_and_the_overlong_buffer_of_dapo():
    rollout, buffer = (
        "actor_rollout_ref.rollout.",
        "reward_model.reward_kwargs.overlong_buffer_cfg.",
    )
    values = {
        "algorithm.adv_estimator": "grpo", rollout + "n_agent": 5, rollout + "n": 2,
        "reward_model.reward_manager": "dapo", buffer + "enable": True, buffer + "len": 128,
        buffer + "penalty_factor": 0.5, "trainer.rollout_data_dir": "out", "max_turns": 2,
        "retriever.topk": 3, "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    }  # fmt: skip
    result = convert_verl(values, ["a.b"])
    data, model = result.config["data"]["init_args"], result.config["model"]["init_args"]
    assert (data["group_size"], model["advantage"]["class_path"]) == (10, "GRPO")
    penalty = {"class_path": "OverlongPenalty", "init_args": {"max_tokens": 512, "buffer": 128}}
    assert (data["rewards"], data["reward_weights"]) == (["a.b", penalty], [1.0, 0.5])
    # `lightning-rl rollout` writes nothing while a policy is trained.
    recorder = {"class_path": "RolloutRecorder", "init_args": {"num_groups": None}}
    assert recorder in result.config["trainer"]["callbacks"]
    assert {"max_turns", "retriever.topk"} <= {item.key for item in result.left}
    kept = values | {"algorithm.filter_groups.enable": True}
    for metric, part in (("acc", "b/acc"), ("score", "b"), ("seq_final_reward", None)):
        kept["algorithm.filter_groups.metric"] = metric
        [spread] = convert_verl(kept, ["a.b"]).config["data"]["init_args"]["selection"]["filters"]
        assert spread.get("init_args", {}).get("part") == part
    assert result.remarks[-1].endswith(
        "left out: actor_rollout_ref.actor.fsdp_config.param_offload"
    )
    with pytest.raises(ConfigError, match="buffer=1000"):
        convert_verl(values | {buffer + "len": 1000})


def test_ppo_of_verl_keeps_its_bounds_and_its_critic():
    model = convert_verl([]).config["model"]["init_args"]
    assert model["loss"]["init_args"] == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert model["critic"]["loss"] == {"coef": 1.0, "clip": 0.5}
    assert (model["critic"]["lr"], model["advantage"]["init_args"]["lam"]) == (1e-5, 1.0)
    remark = convert_verl(["actor_rollout_ref.actor.clip_ratio=0.3"]).remarks[0]
    assert "clip_ratio 0.3 has no effect in verl" in remark
