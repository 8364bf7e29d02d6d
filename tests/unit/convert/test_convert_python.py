"""Test Python scripts that start TRL's trainer: what is read of them, and what is named instead."""

import pytest
import yaml

from lightning_rl.convert.main import main
from lightning_rl.convert.python_trl import read_trl_script
from lightning_rl.errors import ConfigError

SCRIPT = """
import os
from pathlib import Path
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from my.rewards import form as form_reward

open("{there}", "w")  # what is read is never run
NAME = "grpo"
RATE = 1e-5 / 2

def reward_len(completions, **kwargs):
    return [-abs(20 - len(c)) for c in completions]

def main(args):
    rows = load_dataset("openai/gsm8k", "main")
    train = rows["train"].map(lambda row: row).shuffle(seed=1)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"])
    settings = dict(max_steps=100, per_device_train_batch_size=8)
    config = GRPOConfig(
        output_dir=os.path.join("runs", f"{{NAME}}-4"), learning_rate=RATE, seed=args.seed,
        num_generations=4, bf16=True, **settings, **args.more, beta=0.04,
    )
    config.temperature = 0.9
    if os.environ.get("WANDB"):
        config.report_to = "wandb"
    trainer = GRPOTrainer(
        "org/model", [reward_len, form_reward, lambda **k: [0.0]], config, train_dataset=train,
        eval_dataset=rows["test"], peft_config=lora, tools=[reward_len],
    )
    trainer.train()

if __name__ == "__main__":
    raise SystemExit(main(parse_args()))
"""


def test_a_script_is_read_by_its_calls_and_never_run(tmp_path, capsys):
    there = tmp_path / "there"
    (tmp_path / "train.py").write_text(SCRIPT.format(there=there))
    assert main([str(tmp_path / "train.py")]) == 0
    assert not there.exists()
    printed = capsys.readouterr()
    ours = yaml.safe_load(printed.out)
    model, data = ours["model"]["init_args"], ours["data"]["init_args"]
    assert (model["model"], model["optimizer"]["init_args"]["lr"]) == ("org/model", 5e-6)
    assert model["lora"] == {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj"]}
    assert model["kl"]["init_args"] == {"coef": 0.04}
    assert data["sampling"]["temperature"] == 0.9
    assert (data["group_size"], data["groups_per_iteration"]) == (4, 2)
    assert data["rewards"] == ["MODULE.reward_len", "my.rewards.form"]
    of_hub = {"path": "openai/gsm8k", "name": "main", "split": "train"}
    assert data["train_prompts"]["init_args"] == of_hub
    assert ours["trainer"]["default_root_dir"] == "runs/grpo-4"
    said = " ".join(printed.err.split())
    for unread in (
        "seed: args.seed (line",
        "**args.more: args.more (line",
        "report_to: config.report_to (line",
        "reward_len is a function of the script",
        "lambda **k: [0.0] (line",
        "the script goes on with map, shuffle",
        "tools: tools belong to an agent here",
    ):
        assert unread in said, unread


def values_of(text):
    return read_trl_script(text, "s.py").values


def test_models_and_adapters_that_are_loaded_before():
    text = """
RANK = 16
model, tokenizer = FastLanguageModel.from_pretrained(model_name="org/m", revision="v2")
model = FastLanguageModel.get_peft_model(model, r=4 * 2, lora_alpha=RANK, random_state=7)
GRPOTrainer(model=model, args=GRPOConfig("out", optim="sgd"), reward_funcs="org/reward-model")
"""
    assert values_of(text) == {
        "output_dir": "out", "optim": "sgd", "model_name_or_path": "org/m",
        "model_init_kwargs": {"revision": "v2"}, "peft_config": {"r": 8, "lora_alpha": 16},
        "reward_funcs": ["org/reward-model"],
    }  # fmt: skip


def test_what_is_not_literal_is_named():
    """Bound in a branch or loop, in several functions, changed in place, an argument, a call."""
    text = """
rate, steps, size, same = 1, 2, 3, 4
if torch.cuda.is_available():
    rate = 5
for i in range(3):
    steps += 1
size = 6
names = ["a"]
names.append("b")
more = {"x": 1}
more["x"] = 2
once = twice = 7
def f(x, same_too=2):
    twice = 8
class Run:
    def train(self, model):
        GRPOTrainer(model, self.reward, self.config, undefined)
config = GRPOConfig(
    learning_rate=rate, max_steps=steps, seed=size, epsilon=same, report_to=names, beta=f(1),
    model_init_kwargs=more, run_name=x, logging_steps=twice, save_steps=once, eval_steps=-once,
    top_p=1 if rate else 2, **more, num_iterations=[rate],
)
config.beta += 1
"""
    found = read_trl_script(text, "s.py")
    assert found.values == {"seed": 6, "epsilon": 4, "save_steps": 7}
    assert [line.partition(" could")[0] for line in found.missing] == [
        "GRPOConfig: self.config (line 17)",
        "learning_rate: rate (line 19)",
        "max_steps: steps (line 19)",
        "report_to: names (line 19)",
        "beta: config.beta (line 23)",
        "model_init_kwargs: more (line 20)",
        "run_name: x (line 20)",
        "logging_steps: twice (line 20)",
        "eval_steps: -once (line 20)",
        "top_p: 1 if rate else 2 (line 21)",
        "**more: more (line 21)",
        "num_iterations: rate (line 21)",
        "model: model (line 17)",
        "data.rewards: self.reward (line 17)",
        "data.train_prompts: undefined (line 17)",
    ]


def test_a_config_that_a_function_makes_is_the_only_one():
    text = """
def build(beta):
    return GRPOConfig(beta=beta, epsilon=0.2)
data_files = {"train": "a.jsonl", "test": "b.jsonl"}
rows = load_dataset("json", data_files=data_files)
GRPOTrainer("m", "a/b", build(0.1), rows["train"])
"""
    found = read_trl_script(text, "s.py")
    assert found.values == {
        "epsilon": 0.2, "model_name_or_path": "m", "reward_funcs": ["a/b"],
        "dataset_name": "a.jsonl", "dataset_train_split": "train",
    }  # fmt: skip
    assert found.missing == [
        "GRPOConfig: build(...) (line 6) could not be read; the one of line 3 is converted",
        "beta: beta (line 3) could not be read; TRL's default is used",
    ]


def test_what_comes_from_the_command_line_is_said():
    text = """
from trl import GRPOConfig, ModelConfig, TrlParser
config, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
config.beta = 0.1
GRPOTrainer(model=model.model_name_or_path, args=config, reward_funcs=["f"])
"""
    found = read_trl_script(text, "s.py")
    assert found.values == {"beta": 0.1, "reward_funcs": ["f"]}
    assert found.missing[0].startswith("GRPOConfig: its values come from the command line")
    assert "model.model_name_or_path (line 5) could not be read" in found.missing[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "s.py:1: not valid Python"),
        ("print(1)", "it has no call of GRPOTrainer, SFTTrainer"),
        ("PPOTrainer(model)", r"its config \(it starts PPOTrainer\)"),
        ("x = " + "(" * 5000 + ")" * 5000, "s.py"),
        ("x = " + "1 + " * 50_000 + "1", "s.py"),
        ("x = 'a'\n" + "x = x + x\n" * 500 + "y = 9 ** 9 ** 9", "no call of"),
        ("x = 'a'\n" + "x = [x, x]\n" * 500 + "GRPOTrainer(x)", "more than 100,000|deeply"),
        ("\0", "s.py"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_trl_script(text, "s.py")
    assert "\n" not in str(error.value)
