"""Recipes are built as configured, and some train; that all can be read is a unit test.

Slow: recipes train until they have learned something.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.built import Built
from lightning_rl.agents.endings import ENDINGS
from lightning_rl.callbacks import WeightSync
from lightning_rl.cli import main
from lightning_rl.config.layers import load_yaml
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.learn.policies import RolloutModule
from recipes.openai_agent.prepare import prepare as prepare_openai_agent
from recipes.smollm2.prepare import prepare as prepare_smollm2
from recipes.vision import prepare as prepare_vision, warm_start
from tests.support.tiny_models import chatml_tokenizer, save_random_model

ROOT = Path(__file__).parents[2]
EVERYTHING = sorted((ROOT / "recipes").glob("*/*.yaml"))
CONFIGS = [path for path in EVERYTHING if "run_dir" not in load_yaml(str(path))[0]]
REASONING_GYM = ROOT / "recipes" / "reasoning_gym" / "grpo.yaml"
SMOLLM2 = ROOT / "recipes" / "smollm2"


@pytest.fixture(autouse=True)
def _no_seed_left_behind(monkeypatch):
    """Restore the variable that `seed_everything` sets, from which later tests would be seeded."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """Make a random Qwen2 that reads bytes, with the chat format of the model it stands for."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokenizer = chatml_tokenizer()
    save_random_model(
        directory, tokenizer, vocab_size=len(tokenizer), max_position_embeddings=512, **sizes
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_class_is_built(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    cli = Built(["fit", "--config", str(path)])
    given = load_yaml(str(path))[0]["model"]["init_args"]
    assert getattr(cli.model, "model", None) == given.get("model")  # agents have none
    syncs = any(isinstance(c, WeightSync) for c in cli.trainer.callbacks)
    assert syncs == isinstance(cli.model, RolloutModule)


@pytest.mark.slow
def test_a_quickstart_that_was_stopped_goes_on(tmp_path):
    """The model is random: the weights that it trains are downloaded by tests/conformance only."""
    save_random_model(tmp_path / "model", chatml_tokenizer())
    options = ["--model", str(tmp_path / "model"), "--iterations", "3", "--out", "elsewhere"]
    command = [sys.executable, "-m", "lightning_rl", "quickstart", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in first.stdout:
        if line.startswith("iteration 1/3"):
            break
    os.killpg(first.pid, signal.SIGINT)  # as Ctrl-C does
    first.communicate()
    assert first.returncode == 128 + signal.SIGINT
    second = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "fit --config recipes/smollm2/grpo.yaml --ckpt_path last" in second.stdout
    assert "iteration 3/3" in second.stdout
    assert "iteration 1/3" not in second.stdout  # it went on behind it
    assert "Questions that were not trained on, and the most likely answers:" in second.stdout
    [run] = (tmp_path / "elsewhere" / "grpo").iterdir()
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    assert (run / "hf" / "config.json").exists()


def test_one_iteration_of_a_pretrained_model_with_a_stand_in(chat_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = {
        "model.model": chat_model,
        "data.engine": "TransformersEngine",
        "data.train_prompts.size": 8,
        "data.evaluation.prompts.size": 2,
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


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_five_tasks_are_trained_and_evaluated_apart(chat_model, lora, tmp_path, monkeypatch):
    """The test shortens recipes/smollm2 with its variants to one iteration of a random model."""
    monkeypatch.chdir(tmp_path)
    prepare_smollm2(Path("runs/smollm2"))
    options = {
        "model.model": chat_model,
        "data.engine": "TransformersEngine",
        "data.evaluation.limit": 2,
        "data.sampling.max_tokens": 6,
        "data.group_size": 2,
        "data.iterations_per_epoch": 1,
        "trainer.accelerator": "cpu",
    }
    variants = ["five", "lora"] if lora else ["five"]
    files = [SMOLLM2 / "grpo.yaml", *(SMOLLM2 / "variants" / f"{name}.yaml" for name in variants)]
    configs = [word for file in files for word in ("--config", str(file))]
    assert main(["fit", *configs, *(f"--{name}={value}" for name, value in options.items())]) == 0
    run = Path("runs/smollm2/five/version_0")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 1)
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines()[-1:])
    for task in ("products", "largest", "letters", "sums", "stories"):
        assert row[f"rollout/{task}/share"] == 1 / 5
        assert 0.0 <= row[f"eval/{task}/accuracy"] <= 1.0


@pytest.mark.slow
def test_a_model_reads_what_its_teacher_wrote(chat_model, tmp_path, monkeypatch):
    """The teacher's texts are recorded, then read; a random model stands for both."""
    monkeypatch.chdir(tmp_path)
    prepare_smollm2(Path("runs/smollm2"))
    names = ["grpo", "variants/five", "variants/teacher"]
    configs = [word for name in names for word in ("--config", str(SMOLLM2 / f"{name}.yaml"))]
    teacher = {"class_path": "lightning_rl.ModelTeacher", "init_args": {"model": str(chat_model)}}
    teacher["init_args"]["top_k"] = 4
    rewards = json.dumps(["recipes.smollm2.tasks.last_number", teacher])
    options = {
        "model.model": chat_model,
        "data.engine": "TransformersEngine",
        "data.rewards": rewards,
        "data.sampling.max_tokens": 6,
        "data.group_size": 2,
        "trainer.accelerator": "cpu",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    texts = Path("runs/smollm2/texts.sqlite")
    recorded = ["--iterations", "1", "--output", str(texts)]
    assert main(["rollout", *configs, *arguments, *recorded]) == 0
    configs += ["--config", str(SMOLLM2 / "variants/texts.yaml")]
    read = [f"--model.model={chat_model}", "--trainer.accelerator=cpu"]
    assert main(["fit", *configs, *read]) == 0
    summary = json.loads(Path("runs/smollm2/texts/version_0/summary.json").read_text())
    # Ten groups of two, four in a batch, in two passes.
    assert (summary["status"], summary["iterations"]) == ("completed", 4)
    # The student is the teacher until the first step.
    lines = Path("runs/smollm2/texts/version_0/metrics.jsonl").read_text().splitlines()
    losses = [row["policy/loss"] for row in map(json.loads, lines) if "policy/loss" in row]
    assert abs(losses[0]) < 1e-5


@pytest.mark.slow
def test_questions_about_pictures_are_warm_started_and_trained(tmp_path, monkeypatch, capsys):
    """The test shortens recipes/vision to two steps and two iterations; then its result is seen."""
    monkeypatch.setattr(prepare_vision, "NUM_TRAIN", 12)
    monkeypatch.setattr(prepare_vision, "NUM_HELDOUT", 6)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["warm_start", "--steps", "2"])
    warm_start.main()
    options = {
        "data.groups_per_iteration": 4,
        "data.group_size": 2,
        "data.iterations_per_epoch": 2,
        "trainer.accelerator": "cpu",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    recipe = ROOT / "recipes" / "vision" / "grpo.yaml"
    assert main(["check", "--config", str(recipe), *arguments]) == 0
    said = capsys.readouterr().out
    assert "engine and trainer agree to" in said
    assert "'user: [image]" in said
    assert main(["fit", "--config", str(recipe), *arguments]) == 0
    run = Path("runs/vision/grpo/version_0")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines()[-1:])
    for task in ("count", "read", "odd"):
        assert 0.0 <= row[f"eval/{task}/accuracy"] <= 1.0
    recorded = open_rollouts(run / "rollouts.jsonl")
    shown = {r.rollout.prompt.pictures[0].digest for r in recorded.read()}
    assert {file.stem for file in (run / "pictures").iterdir()} == shown
    assert main(["view", str(run)]) == 0
    assert (run / "hf" / "preprocessor_config.json").exists()


@pytest.mark.slow
def test_a_script_with_the_openai_package_is_trained(tmp_path, monkeypatch):
    """The test shortens recipes/openai_agent on real vLLM to 30 steps and two iterations."""
    pytest.importorskip("vllm")
    monkeypatch.chdir(ROOT)
    data = tmp_path / "data"
    prepare_openai_agent(data)
    recipe = ROOT / "recipes" / "openai_agent"
    warm = {
        "model.model": data / "model",
        "data.train.path": data / "sft.jsonl",
        "trainer.max_steps": 30,
        "trainer.accelerator": "cpu",
        "trainer.logger.save_dir": tmp_path,
    }
    arguments = [f"--{name}={value}" for name, value in warm.items()]
    # The list of callbacks is of the file; the last has the directory of the export.
    arguments += [f"--trainer.callbacks.directory={tmp_path / 'sft_hf'}"]
    assert main(["fit", "--config", str(recipe / "sft.yaml"), *arguments]) == 0
    options = {
        "model.model": tmp_path / "sft_hf",
        "data.train_prompts.path": data / "digits.jsonl",
        "data.evaluation.prompts.path": data / "digits.jsonl",
        "data.evaluation.samples": 1,
        "data.groups_per_iteration": 4,
        "data.group_size": 4,
        "data.iterations_per_epoch": 2,
        "trainer.accelerator": "cpu",
        "trainer.logger.save_dir": tmp_path,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    assert main(["fit", "--config", str(recipe / "grpo.yaml"), *arguments]) == 0
    run = tmp_path / "grpo" / "version_0"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    metrics = summary["metrics"]
    assert metrics["rollout/completed"] == 16
    assert [v for k, v in metrics.items() if k.startswith("agent/")] == [0.0] * len(ENDINGS)
    assert metrics["rollout/rows_per_episode"] == 1.0
    assert metrics["rollout/logprob_gap_max"] < 1e-3
    for line in (run / "rollouts.jsonl").read_text().splitlines():
        rollout = json.loads(line)
        # What the script says is what was played: a hit is the end of the game.
        guesses = [m["content"] for m in rollout["completion"] if m["role"] == "assistant"]
        assert len(rollout["calls"]) == len(guesses) <= 4
        hit = guesses[-1] == str(rollout["prompt"]["columns"]["digit"])
        assert rollout["environment_reward"] == float(hit)
