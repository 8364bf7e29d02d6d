"""Python scripts that start TRL's trainer: what is read of them, and what is named instead."""

import pytest
import yaml

from lightning_rl.convert.main import main
from lightning_rl.convert.python_script import PythonScript
from lightning_rl.convert.python_trl import read_trl_script
from lightning_rl.errors import ConfigError

SCRIPT = """
import argparse, os
from pathlib import Path
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from my.rewards import form as form_reward

open("{there}", "w")  # what is read is never run
BASE = Path("runs")
RATE = 1e-5 / 2

def reward_len(completions, **kwargs):
    return [-abs(20 - len(c)) for c in completions]

def parse_args():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("sizes")
    group.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--no_lora", action="store_true")
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()

def build(args, **more):
    settings = dict(max_steps=100, per_device_train_batch_size=8)
    return GRPOConfig(
        output_dir=str(BASE / f"grpo-{{args.num_generations}}"), learning_rate=RATE, seed=args.seed,
        num_generations=args.num_generations, bf16=not args.no_lora, **settings, **more
    )

def main():
    args = parse_args()
    rows = load_dataset("openai/gsm8k", "main")
    train = rows["train"].map(lambda row: row).shuffle(seed=1)
    lora = None if args.no_lora else LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"])
    config = build(args, beta=0.04)
    config.temperature = 0.9
    if os.environ.get("WANDB"):
        config.report_to = "wandb"
    trainer = GRPOTrainer(
        "org/model", [reward_len, form_reward, lambda **k: [0.0]], config, train_dataset=train,
        eval_dataset=rows["test"], peft_config=lora, tools=[reward_len],
    )
    trainer.train()

if __name__ == "__main__":
    raise SystemExit(main())
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
        "seed: the script's argument --seed (line",
        "report_to: config.report_to (line",
        "reward_len is a function of the script",
        "lambda **k: [0.0] (line",
        "the script goes on with map, shuffle",
        "tools: tools belong to an agent here",
        "no_lora=False, num_generations=4",
    ):
        assert unread in said, unread


def values_of(text):
    return read_trl_script(text, "s.py").values


def test_models_and_adapters_that_are_loaded_before():
    text = """
model, tokenizer = FastLanguageModel.from_pretrained(model_name="org/m", revision="v2")
model = FastLanguageModel.get_peft_model(model, r=4 * 2, lora_alpha=RANK, random_state=7)
RANK = 16
GRPOTrainer(model=model, args=GRPOConfig("out", optim="sgd"), reward_funcs="org/reward-model")
"""
    assert values_of(text) == {
        "output_dir": "out", "optim": "sgd", "model_name_or_path": "org/m",
        "model_init_kwargs": {"revision": "v2"}, "peft_config": {"r": 8, "lora_alpha": "RANK"},
        "reward_funcs": ["org/reward-model"],
    }  # fmt: skip


def test_classes_and_functions_that_nobody_calls_are_entered():
    text = """
from dataclasses import dataclass
from datasets import load_dataset
@dataclass
class Mine(trl.GRPOConfig):
    beta: float = 0.1
    epsilon: float = 0.2
class Run:
    rows = load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})
    def train(self, model):
        GRPOTrainer(model, self.reward, self.config, self.rows["train"])
    def __init__(self, size=3):
        self.config = Mine(beta=0.2, num_iterations=size)
        self.rows = Run.rows
"""
    found = read_trl_script(text, "s.py")
    assert found.values == {
        "beta": 0.2, "epsilon": 0.2, "num_iterations": 3, "dataset_name": "a.jsonl",
        "dataset_train_split": "train",
    }  # fmt: skip
    assert [line.partition(" could")[0] for line in found.missing] == [
        "model: model of train() (line 10)",
        "data.rewards: self.reward (line 11)",
    ]


def test_what_only_a_run_would_decide_is_not_read():
    text = """
rate, steps, size, same = 1, 2, 3, 4
if torch.cuda.is_available():
    rate = 5
for i in range(3):
    steps += 1
def early(x):
    if x():
        return 1
    return 2
if not False and 2 > 1:
    size = 6
config = GRPOConfig(learning_rate=rate, max_steps=steps, seed=size, beta=early(y), epsilon=same)
"""
    found = read_trl_script(text, "s.py")
    assert found.values == {"seed": 6, "epsilon": 4}
    assert [line.partition(":")[0] for line in found.missing] == [
        "learning_rate", "max_steps", "beta",
    ]  # fmt: skip
    assert "rate, by torch.cuda.is_available() (line 3) could not be read" in found.missing[0]


def test_what_comes_from_the_command_line_is_said():
    text = """
from trl import GRPOConfig, ModelConfig, TrlParser
config, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
config.beta = 0.1
GRPOTrainer(model=model.model_name_or_path, args=config, reward_funcs=[f])
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
        ("def f(): return f() + f()\nf()", "more than 100,000 steps|no call of"),
        ("\0", "s.py"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_trl_script(text, "s.py")
    assert "\n" not in str(error.value)


def test_values_stay_small():
    script = PythonScript("x = 'a'\n" + "x = x + x\n" * 500 + "f(x, 'a' * 10**9)", "s.py", ("f",))
    (call,) = script.calls
    assert not any(isinstance(value, str) for value in call.args)
