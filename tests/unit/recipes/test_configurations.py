"""Every recipe's configuration can be read, and what it says is what its page says."""

from pathlib import Path

import pytest
from reasoning_gym import create_dataset

from benchmarks.support.built import Built
from lightning_rl import MathVerify, ThinkingBudget
from lightning_rl.config.layers import load_yaml
from lightning_rl.games.staged import command as staged
from tests.support.command_parser import read

ROOT = Path(__file__).parents[3]
EVERYTHING = sorted((ROOT / "recipes").glob("*/*.yaml"))
STAGED = [path for path in EVERYTHING if "run_dir" in load_yaml(str(path))[0]]
CONFIGS = [path for path in EVERYTHING if path not in STAGED]
REASONING_GYM = ROOT / "recipes" / "reasoning_gym" / "grpo.yaml"


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    # `seed_everything` sets this variable, from which later tests would take their seed.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def test_there_are_recipes_to_check():
    assert REASONING_GYM in CONFIGS
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_key_and_class_exists(path):
    read(["fit", "--config", str(path)])


@pytest.mark.parametrize(
    "names",
    [["qwen3_600m"], ["qwen3_1700m", "lora"], ["qwen3_8b"], ["lora", "cpu"]],
    ids=lambda n: "+".join(n),
)
def test_variants_of_math_are_merged(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the checkout may belong to somebody else
    recipe = ROOT / "recipes" / "math"
    files = [recipe / "grpo.yaml", *(recipe / "variants" / f"{name}.yaml" for name in names)]
    cli = Built(["fit", *(word for file in files for word in ("--config", str(file)))])
    assert (cli.model.lora is not None) == ("lora" in names)
    assert isinstance(cli.datamodule.agent, ThinkingBudget) == (names[0] != "lora")
    assert type(next(iter(cli.datamodule.rewards.functions.values()))) is MathVerify
    # Where no length is set, every word of the models' answers has room behind the longest prompt.
    assert getattr(cli.datamodule.engine, "max_model_len", None) is None


@pytest.mark.parametrize("path", STAGED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_key_of_a_staged_run_exists(path):
    parser = staged.make_parser()
    trainer = staged.build(staged.parse(["--config", str(path)], parser), parser)
    given = load_yaml(str(path))[0]
    assert str(trainer.run_dir) == given["run_dir"]
    algorithm = given["algorithm"]
    named = algorithm if isinstance(algorithm, str) else algorithm["class_path"]
    assert type(trainer.algorithm).__name__ == named


def test_no_held_out_question_is_trained_on():
    init_args = load_yaml(str(REASONING_GYM))[0]["data"]["init_args"]
    sets = init_args["train_prompts"], init_args["evaluation"]["prompts"]
    train, heldout = (
        {
            entry["question"]
            for entry in create_dataset(
                a["task"], size=a["size"], seed=a["task_seed"], **a["config"]
            )
        }
        for a in (part["init_args"] for part in sets)
    )
    assert len(heldout) == 200
    assert not train & heldout
