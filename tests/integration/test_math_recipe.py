"""Test recipes/math from end to end at a tiny size: a local hub, rewards, thoughts, a LoRA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from recipes.math.data import problems
from recipes.math.make_model import ROWS, SHAPES, SHARED, prepare
from tests.support.hub import CARD, Hub
from tests.support.serving import serving

pytestmark = pytest.mark.slow

pytest.importorskip("math_verify")
ROOT = Path(__file__).parents[2]
VARIANTS = "recipes/math/variants"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
}


@pytest.fixture(scope="module")
def hub():
    """Serve a hub with data as `openai/gsm8k` is: two splits of a configuration called main."""
    hub = Hub()
    splits = {"train": problems(40, seed=0), "test": problems(8, seed=1)}
    files = {
        f"main/{split}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
        for split, rows in splits.items()
    }
    hub.repository("openai/gsm8k").commit(files | {"README.md": CARD.replace(b"socratic", b"more")})
    with serving(hub):
        yield hub


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make stand-ins as the recipe does, but for their size; the vocabulary is the true one."""
    out = tmp_path_factory.mktemp("math")
    prepare(out, "qwen2.5-0.5b", **TINY)
    prepare(out, "qwen3-0.6b", **TINY, head_dim=16)
    return out


def fit(hub, models, folder, variants, options):
    files = ["recipes/math/grpo.yaml", *(f"{VARIANTS}/{name}.yaml" for name in variants)]
    given = {
        "data.engine": "TransformersEngine",
        "data.engine.dtype": "float32",
        "data.groups_per_iteration": 2,
        "data.group_size": 2,
        "data.iterations_per_epoch": 2,
        "data.evaluation.limit": 2,
        "data.sampling.max_tokens": 12,
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
        "trainer.max_epochs": 1,
        "trainer.logger.save_dir": folder,
        "trainer.logger.name": "run",
    } | options
    arguments = [word for file in files for word in ("--config", file)]
    arguments += [f"--{name}={value}" for name, value in given.items()]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rl", "fit", *arguments],
        cwd=ROOT,
        env=kept | {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    run = folder / "run" / "version_0"
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return run, json.loads((run / "summary.json").read_text()), rows


def test_gsm8k_from_the_hub_is_graded_by_math_verify(hub, models, tmp_path):
    options = {"model.model": models / "qwen2.5-0.5b"}
    run, summary, rollouts = fit(hub, models, tmp_path, [], options)
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    assert summary["metrics"]["rollout/completed"] == 4
    assert summary["metrics"]["reward/math_verify"] == 0.0  # of noise, and all of it was graded
    reasons = {r["extra"]["math"] for r in rollouts}
    assert reasons <= {"wrong", "no_answer", "unreadable"}
    system, user = rollouts[0]["prompt"]["prompt"]
    assert "\\boxed{}" in system["content"]
    asked = {row["question"]: row["answer"] for row in problems(40, seed=0)}
    answer = rollouts[0]["prompt"]["columns"]["answer"]
    assert asked[user["content"]].endswith(f"#### {int(answer):,}")
    assert (run / "hf" / "model.safetensors").exists()
    assert list(run.glob("checkpoints/*.ckpt"))


def test_a_thinking_model_with_adapters_ends_within_its_budget(hub, models, tmp_path):
    options = {
        "model.model": models / "qwen3-0.6b",
        "data.agent.max_thinking_tokens": 4,
        "data.sampling.max_tokens": 16,
        # Noise solves nothing; this tells it apart, so that there is something to learn from.
        "data.rewards": "[lightning_rl.MathVerify,recipes.math.data.digit_share]",
    }
    run, summary, rollouts = fit(hub, models, tmp_path, ["qwen3_600m", "lora"], options)
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    # The template opens the thought, and noise does not close it.
    closed = AutoTokenizer.from_pretrained(models / "qwen3-0.6b").convert_tokens_to_ids("</think>")
    written = [r["rows"][0] for r in rollouts if r["logged"]["thinking/closed"]]
    assert written
    for row in written:
        place = row["token_ids"].index(closed)
        assert not row["loss_mask"][place]
        assert all(row["loss_mask"][:4])
        assert row["loss_mask"][-1]
    assert summary["metrics"]["logged/thinking/closed"] > 0
    assert summary["metrics"]["rollout/logprob_gap_max"] < 1e-3
    assert (run / "hf" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", SHAPES)
def test_a_stand_in_has_the_true_shape(name):
    kind, shape = SHAPES[name]
    config = kind(**SHARED | shape)
    assert config.vocab_size == ROWS
    embeddings = ROWS * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
    hidden, layers = config.hidden_size, config.num_hidden_layers
    attention = 2 * hidden * size * sum(heads) + 2 * hidden + 3 * hidden * config.intermediate_size
    # Qwen2 has biases of queries, keys and values, Qwen3 norms of queries and keys.
    small = 2 * size if name.startswith("qwen3") else size * (heads[0] + 2 * heads[1])
    assert embeddings + layers * (attention + small) + hidden == PARAMETERS[name]


def test_the_example_for_two_nodes_is_planned_without_weights(tmp_path):
    """The example is docs/launch.md's, with two of the 36 layers and shorter thoughts."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    prepare(tmp_path / "runs" / "math", "qwen3-8b", weights=False, num_hidden_layers=2)
    files = ["recipes/math/grpo.yaml", f"{VARIANTS}/qwen3_8b.yaml", f"{VARIANTS}/rows.yaml"]
    command = [sys.executable, "-m", "lightning_rl", "check"]
    command += [word for file in files for word in ("--config", file)]
    command += ["--model.model", "runs/math/qwen3-8b", "--model.loading.random_init", "true"]
    command += ["--gpus", "8", "--gpu_memory_gb", "80", "--data.sampling.max_tokens", "128"]
    command += ["--data.agent.max_thinking_tokens", "64"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "planned: 8 GPUs of 80 GiB on 1 node, which train as a Sharded" in done.stdout
    assert "VLLMServer has GPUs of its own" in done.stdout
    assert "--trainer.devices 8 --trainer.num_nodes 1 " in done.stdout
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_stand_in_reads_and_writes_chats_in_qwens_form(models):
    tokenizer = AutoTokenizer.from_pretrained(models / "qwen3-0.6b")
    assert AutoConfig.from_pretrained(models / "qwen3-0.6b").vocab_size == ROWS >= len(tokenizer)
    chat = [{"role": "user", "content": "Ben has 42 apples."}]
    for thinks, end in ((True, "<think>\n"), (False, "<think>\n\n</think>\n\n")):
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinks
        )
        opening = "<|im_start|>user\nBen has 42 apples.<|im_end|>\n<|im_start|>assistant\n"
        assert text == opening + end
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text) / 2  # words it was trained on are not spelt out
