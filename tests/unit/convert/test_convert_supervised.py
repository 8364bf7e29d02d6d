"""TRL's configurations of SFT, DPO, KTO and reward models as ours; whose trainer a file is for."""

import json

import pytest
import yaml

from lightning_rl.convert.main import main
from lightning_rl.convert.trainers_trl import SUPERVISED, trainer_of
from lightning_rl.convert.trl import convert_trl
from lightning_rl.errors import ConfigError
from tests.unit.convert.vanishing import as_written, names, vanished

FIELDS = {
    "sft": """learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef max_length
        chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token
        truncation_mode shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of
        eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading""",
    "dpo": """learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef max_length
        disable_dropout dataset_num_proc truncation_mode padding_free pad_to_multiple_of beta
        precompute_ref_log_probs precompute_ref_batch_size loss_type loss_weights ld_alpha
        f_divergence_type f_alpha_divergence_coef label_smoothing use_weighting discopop_tau
        activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        pad_token""",
    "kto": """learning_rate train_sampling_strategy model_init_kwargs trust_remote_code max_length
        router_aux_loss_coef disable_dropout dataset_num_proc pad_to_multiple_of beta loss_type
        precompute_ref_log_probs precompute_ref_batch_size desirable_weight undesirable_weight
        activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps""",
    "reward": """learning_rate model_init_kwargs trust_remote_code chat_template_path eos_token
        disable_dropout dataset_num_proc max_length pad_to_multiple_of pad_token
        center_rewards_coefficient activation_offloading""",
}
"""The fields of each configuration in TRL 1.16, but for those that all trainers have."""
OURS = {
    "sft": ("SFTModule", "SFTDataModule"),
    "dpo": ("DPOModule", "PairDataModule"),
    "kto": ("KTOModule", "KTODataModule"),
    "reward": ("RewardModelModule", "RewardPairDataModule"),
    "grpo": ("PolicyModule", "RLDataModule"),
}
SHARED = {"learning_rate": 1e-5, "output_dir": "out", "bf16": True, "num_train_epochs": 2}


def classes(config):
    return config["model"]["class_path"], config["data"]["class_path"]


@pytest.mark.parametrize("trainer", SUPERVISED)
def test_every_field_has_a_row(trainer):
    assert [name for name in FIELDS[trainer].split() if name not in SUPERVISED[trainer].rows] == []


OTHER = {
    "loss_type": "dft", "max_steps": 64, "eval_strategy": "steps", "report_to": "wandb",
    "lr_scheduler_type": "cosine", "optim": "sgd", "dataset_name": "a/hub", "save_strategy": "no",
    "fp16": True, "bf16": False, "greater_is_better": False, "label_smoothing": 0.25,
    "adam_beta1": 0.8, "adam_beta2": 0.9, "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "model_init_kwargs": {"subfolder": "v2"}, "lora_target_modules": ["q_proj"],
    "lora_modules_to_save": ["norm"], "accelerator_config": {"split_batches": True},
    "run_name": "run", "model_name_or_path": "m",
}  # fmt: skip
ENABLED = {
    "max_steps": 100, "save_steps": 10, "bf16": True, "use_peft": True, "eval_steps": 7,
    "eval_strategy": "steps", "metric_for_best_model": "loss", "report_to": "tensorboard",
    "lr_scheduler_type": "cosine_with_min_lr",
}  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "name"),
    [(trainer, name) for trainer in SUPERVISED for name in FIELDS[trainer].split()],
)
def test_no_option_of_its_own_is_dropped_in_silence(trainer, name):
    check_nothing_vanishes(trainer, name)


@pytest.mark.parametrize("trainer", SUPERVISED)
def test_no_shared_option_is_dropped_in_silence(trainer):
    for name in SUPERVISED[trainer].rows.keys() - set(FIELDS[trainer].split()):
        check_nothing_vanishes(trainer, name)


def check_nothing_vanishes(trainer, name):
    row = SUPERVISED[trainer].rows[name]
    other = OTHER.get(name)
    if other is None:
        value = row.default
        whole = row.kind.startswith("integer") or "max" in name or "steps" in name
        other = not value if isinstance(value, bool) else value * 2 if value else 0.25
        if not isinstance(value, bool | int | float):
            flags = row.kind == "flag"
            other = (
                True
                if flags
                else f"other_{name}"
                if isinstance(value, str)
                else 16
                if whole
                else 0.5
            )
    # This is what is written for all others where a row has a single known value.
    values = (as_written(row) if len(row.values) != 1 else ..., other)

    def convert(said):
        return convert_trl(said, trainer=trainer)

    for start in (ENABLED, SHARED):
        assert vanished(convert, start, name, values) == [], (name, values)


@pytest.mark.parametrize("trainer", SUPERVISED)
def test_what_they_share_is_carried_over(trainer):
    values = {
        "model_name_or_path": "m", "dataset_name": "a/hub", "dataset_config": "main", "seed": 5,
        "eval_strategy": "steps", "eval_steps": 3, "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 2, "max_steps": 60, "save_steps": 20, "warmup_steps": 0.1,
        "max_length": 512, "data_seed": 7, "learning_rate": "1e-5", "max_grad_norm": 0.5,
    }  # fmt: skip
    config = convert_trl(values, devices=2, trainer=trainer).config
    model, data, run = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    assert classes(config) == OURS[trainer]
    assert (model["model"], model["loading"]) == ("m", {"gradient_checkpointing": True})
    assert model["optimizer"]["init_args"]["lr"] == 1e-5
    assert model["lr_scheduler"]["init_args"] == {"warmup_steps": 6, "total_steps": 60}
    rows = {"path": "a/hub", "name": "main"}
    assert data["train"]["init_args"] == rows | {"split": "train"}
    assert data["val"]["init_args"] == rows | {"split": "test"}
    assert (data["batch_size"], data["max_length"], data["seed"]) == (2, 512, 7)
    said = {"max_steps": 60, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "devices": 2}
    assert said.items() <= run.items()
    assert (run["precision"], config["seed_everything"]) == ("bf16-mixed", 5)
    assert (run["val_check_interval"], run["check_val_every_n_epoch"]) == (12, None)  # batches
    saved = {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 20}}
    assert saved in run["callbacks"]


def test_each_has_its_own_defaults_and_numbers():
    def model(trainer, **values):
        return convert_trl(values, trainer=trainer).config["model"]["init_args"]

    rates = {name: model(name)["optimizer"]["init_args"]["lr"] for name in SUPERVISED}
    assert rates == {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}
    dpo = model("dpo", label_smoothing=0.1, loss_type=["sigmoid"])
    assert (dpo["beta"], dpo["smoothing"]) == (0.1, 0.1)
    kto = model("kto", desirable_weight=2, beta=0.3)
    assert (kto["beta"], kto["desirable_weight"], kto["undesirable_weight"]) == (0.3, 2, 1.0)
    assert model("reward", center_rewards_coefficient=0.01)["centering"] == 0.01
    assert model("dpo", use_peft=True)["lora"]["rank"] == 16
    assert "lora" not in model("sft", use_peft=True)
    assert names(convert_trl({"use_peft": True}, trainer="sft"), "use_peft")
    data = convert_trl({"max_seq_length": 99}, trainer="sft").config["data"]["init_args"]
    assert data["max_length"] == 99
    left = convert_trl({"loss_type": ["sigmoid", "sft"]}, trainer="dpo").left
    assert [item.key for item in left] == ["loss_type"]
    for trainer, wrong, message in (
        ("dpo", {"beta": 0}, "beta=0: it takes a number > 0"),
        ("dpo", {"label_smoothing": 0.5}, r"smoothing=0.5\) must be in"),
        ("kto", {"desirable_weight": 0, "undesirable_weight": 0}, "one > 0"),
        ("reward", {"center_rewards_coefficient": -1}, "it takes a number >= 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert_trl(wrong, trainer=trainer)


TELLING = {
    "sft": {"packing": False},
    "dpo": {"beta": 0.1, "loss_type": ["sigmoid"]},
    "kto": {"desirable_weight": 1.0},
    "reward": {"center_rewards_coefficient": 0.01},
    "grpo": {"num_generations": 8},
}
CALLS = {
    "sft": ("SFT", "'m', SFTConfig(learning_rate=1e-5)"),
    "dpo": ("DPO", "'m', None, DPOConfig(learning_rate=1e-5)"),
    "kto": ("KTO", "'m', args=KTOConfig(learning_rate=1e-5)"),
    "reward": ("Reward", "'m', args=RewardConfig(learning_rate=1e-5)"),
    "grpo": ("GRPO", "'m', 'a.b', GRPOConfig(learning_rate=1e-5)"),
}


@pytest.mark.parametrize("trainer", OURS)
@pytest.mark.parametrize(
    "way", ["options", "file", "dump", "option", "trl", "launched", "python", "alone"]
)
def test_the_trainer_is_that_of_the_options_the_file_or_the_script(tmp_path, capsys, trainer, way):
    """A file of SFT with shared options only became a GRPO run."""
    class_name, arguments = CALLS[trainer]
    script = "reward_modeling" if trainer == "reward" else trainer
    import_all = f"from trl import {class_name}Config, {class_name}Trainer\n"
    called, text = {
        "options": ("c.yaml", yaml.safe_dump(SHARED | TELLING[trainer])),
        "file": (f"{trainer}_qwen.yaml", yaml.safe_dump(SHARED)),
        "dump": ("args.json", json.dumps(dump() | TELLING[trainer])),
        "option": ("c.yaml", yaml.safe_dump(SHARED)),
        "trl": ("--", f"trl {trainer} --learning_rate 1e-5"),
        "launched": ("--", f"accelerate launch --num_processes 2 trl/{script}.py --seed 1"),
        "python": ("s.py", f"{import_all}{class_name}Trainer({arguments}).train()\n"),
        "alone": ("s.py", f"{import_all}config = {class_name}Config(learning_rate=1e-5)\n"),
    }[way]
    more = ["--trainer", trainer] if way == "option" else []
    assert main([*more, *given(tmp_path, called, text)]) == 0
    assert classes(yaml.safe_load(capsys.readouterr().out)) == OURS[trainer]


def given(folder, called, text):
    """Return convert's arguments for a file of this name and text; "--": the text is a command."""
    if called == "--":
        return ["--", *text.split()]
    (folder / called).write_text(text)
    return [str(folder / called)]


def dump():
    """Return what ``to_dict()`` of any of them holds beside its own options."""
    from transformers import TrainingArguments

    values = TrainingArguments(output_dir="out", use_cpu=True).to_dict()
    return json.loads(json.dumps(values, default=str))


def test_a_trainer_that_no_option_tells_is_asked_for(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(SHARED))
    with pytest.raises(ConfigError, match=r"grpo, sft, dpo, kto, reward .*: --trainer"):
        main([str(tmp_path / "c.yaml")])
    assert main([str(tmp_path / "c.yaml"), "--rewards", "a.b"]) == 0
    assert classes(yaml.safe_load(capsys.readouterr().out)) == OURS["grpo"]
    (tmp_path / "c.yaml").write_text("beta: 0.1\nmax_length: 9\n")
    with pytest.raises(ConfigError, match="the trainers dpo, kto of TRL"):
        main([str(tmp_path / "c.yaml")])


@pytest.mark.parametrize(
    ("name", "text", "trainer"),
    [
        ("rloo.yaml", "num_generations: 4\n", "rloo"),
        ("my_orpo.yaml", "beta: 0.1\n", "orpo"),
        ("online-dpo.yaml", "beta: 0.1\n", "onlinedpo"),
        ("--", "trl rloo --beta 0.1", "rloo"),
        ("s.py", "from trl import CPOTrainer\nCPOTrainer(model)\n", "CPOTrainer"),
    ],
)
def test_other_trainers_are_refused_by_name(tmp_path, name, text, trainer):
    with pytest.raises(ConfigError, match=trainer):
        main(given(tmp_path, name, text))


def test_names_of_trainers():
    named = {
        "SFTTrainer": "sft", "online_dpo.py": "onlinedpo", "ppo.yaml": "ppo", "gkd": "gkd",
        "ServerDistillationTrainer": "serverdistillation", "config_qwen": None, "sft_dpo": None,
        "reward_modeling.py": "reward", "RLOOTrainer": "rloo",
    }  # fmt: skip
    assert {text: trainer_of(text) for text in named} == named


def test_the_quick_starts_of_trl_are_read(tmp_path, capsys):
    """A trainer without a configuration has TRL's defaults; it ended in an AttributeError."""
    script = """
from datasets import load_dataset
from trl import {0}Trainer
trainer = {0}Trainer(model="a/model", train_dataset=load_dataset("a/rows", split="train[:9]"){1})
trainer.train()
"""
    for trainer, (name, _) in CALLS.items():
        more = ', reward_funcs=["a.b"]' if trainer == "grpo" else ""
        (tmp_path / "s.py").write_text(script.format(name, more))
        assert main([str(tmp_path / "s.py")]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        data = config["data"]["init_args"]
        assert classes(config) == OURS[trainer]
        assert config["model"]["init_args"]["model"] == "a/model"
        rows = data["train_prompts" if trainer == "grpo" else "train"]["init_args"]
        assert rows == {"path": "a/rows", "split": "train[:9]"}
