"""Every recipe's configuration goes through the real parser; the reasoning-gym one also trains."""

import json
from pathlib import Path

import pytest
import torch
from reasoning_gym import create_dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightning_rl.callbacks import WeightSync
from lightning_rl.cli import main
from lightning_rl.cli.app import RLCLI
from lightning_rl.config.layers import load_yaml
from lightning_rl.module import PolicyModule

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes").glob("*/*.yaml"))
REASONING_GYM = ROOT / "recipes" / "reasoning_gym" / "grpo.yaml"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Parsed(RLCLI):
    """Builds everything a command needs, and does not run it."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_seed_left_behind(monkeypatch):
    """`seed_everything` sets this variable, from which later tests would take their seed."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """A random Qwen2 that reads bytes, with the chat format of the model it stands in for."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *bytes_to_unicode().values()])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None
    )
    tokenizer.chat_template = CHATML
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_there_are_recipes_to_check():
    assert REASONING_GYM in CONFIGS
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_key_exists_and_every_class_is_built(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    cli = Parsed(["fit", "--config", str(path)])
    assert cli.model.model == load_yaml(str(path))[0]["model"]["init_args"]["model"]
    syncs = any(isinstance(c, WeightSync) for c in cli.trainer.callbacks)
    assert syncs == isinstance(cli.model, PolicyModule)


def test_no_held_out_question_is_trained_on():
    init_args = load_yaml(str(REASONING_GYM))[0]["data"]["init_args"]
    train, heldout = (
        {
            entry["question"]
            for entry in create_dataset(
                a["task"], size=a["size"], seed=a["task_seed"], **a["config"]
            )
        }
        for a in (init_args[name]["init_args"] for name in ("train_prompts", "eval_prompts"))
    )
    assert len(heldout) == 200
    assert not train & heldout


def test_one_iteration_of_reasoning_gym_with_a_stand_in(chat_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = {
        "model.model": chat_model,
        "data.engine": "TransformersEngine",
        "data.train_prompts.size": 8,
        "data.eval_prompts.size": 2,
        "data.sampling.max_tokens": 6,
        "data.groups_per_iteration": 2,
        "data.group_size": 3,
        "data.iterations_per_epoch": 1,
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": 1,
        "trainer.logger.save_dir": tmp_path,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    assert main(["fit", "--config", str(REASONING_GYM), *arguments]) == 0
    run = tmp_path / "grpo" / "version_0"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["iterations"] == 1
    # A random model does not solve sums: every answer is graded, and graded wrong.
    assert summary["accuracy_before"] == summary["accuracy_after"] == 0.0
    assert summary["metrics"]["rollout/completed"] == 6
    assert summary["metrics"]["reward/reasoning_gym_score"] == 0.0
    # The first step of a warm-up over 10: 1/11 of the learning rate.
    assert summary["metrics"]["policy/lr"] == pytest.approx(1e-6 / 11)
    rollout = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
    system, user = rollout["prompt"]["prompt"]
    assert "<answer>" in system["content"]
    assert user["content"].startswith("State the final answer to the following arithmetic problem")
    assert rollout["completion"][0]["role"] == "assistant"
    assert list(run.glob("checkpoints/*.ckpt"))
    assert (run / "hf" / "model.safetensors").exists()
