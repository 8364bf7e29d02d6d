"""Test the parts of lightning-rl rehearse: tiny models, the small run, verdicts."""

import json

import pytest
import torch
import transformers as hf

from lightning_rl.agents.base import SingleTurn
from lightning_rl.agents.tools import Toolbox
from lightning_rl.cli.rehearse.findings import Kind, RunFinding, RunVerdict
from lightning_rl.cli.rehearse.judge_cost import Prices, judge_costs
from lightning_rl.cli.rehearse.smaller import REWARD, Smaller, without_weights, world_size
from lightning_rl.cli.rehearse.spread import by_chance
from lightning_rl.cli.rehearse.tiny_model import MOST_PARAMETERS, shrunk, write_tiny
from lightning_rl.cli.rehearse.tool_trial import try_tools
from lightning_rl.collect.tasks import Task
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.models.pretrained import Loading
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.judge import LLMJudge
from lightning_rl.rewards.judge_models import OpenAIJudge
from lightning_rl.rollout import Prompt
from recipes.sort_digits.prepare import make_tokenizer
from recipes.sort_digits.reward import exact_match

KINDS = [
    "Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3Next", "Gemma3Text", "Mistral", "DeepseekV3",
    "GptOss", "Glm4Moe", "NemotronH", "FalconH1", "Mamba2", "GPT2", "SmolLM3",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_has_the_kinds_of_layers_of_the_big_one(kind):
    big = getattr(hf, f"{kind}Config")()
    small = shrunk(big)
    assert type(small) is type(big)
    assert small.vocab_size == big.vocab_size
    assert small.tie_word_embeddings == big.tie_word_embeddings
    assert small.num_hidden_layers <= min(8, big.num_hidden_layers)
    if (kinds := getattr(big, "layer_types", None)) is not None:
        assert set(small.layer_types) == set(kinds)
    with torch.device("meta"):
        lm = hf.AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in lm.parameters()) <= MOST_PARAMETERS


@pytest.mark.parametrize(
    ("heads", "keys", "small"), [(32, 8, (4, 1)), (14, 2, (7, 1)), (8, 8, (2, 2)), (64, 1, (8, 1))]
)
def test_the_ratio_of_heads_to_keys_stays(heads, keys, small):
    """Up to eight heads for a key, and 32 numbers for each head."""
    big = hf.Qwen2Config(
        hidden_size=128 * heads, num_attention_heads=heads, num_key_value_heads=keys
    )
    made = shrunk(big)
    assert (made.num_attention_heads, made.num_key_value_heads) == small
    assert made.hidden_size == 32 * small[0]


def test_a_model_that_reads_pictures_is_refused_by_name():
    with pytest.raises(ConfigError, match="no tiny LlavaConfig is made"):
        shrunk(hf.LlavaConfig())


@pytest.fixture(params=[0, 1])
def big_model(tmp_path, request):
    """Return a folder with the configuration of a model of seven billion parameters.

    Its end token, 1, may be its padding too, whose embedding transformers makes of zeros.
    """
    config = hf.Qwen2Config(
        vocab_size=16, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, eos_token_id=1,
        pad_token_id=request.param, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "big")
    make_tokenizer().save_pretrained(tmp_path / "big")
    return tmp_path / "big"


def test_a_tiny_model_is_always_the_same_and_ends_some_completions(big_model, tmp_path):
    for name in ("a", "b"):
        write_tiny(str(big_model), Loading(), tmp_path / name)
    a, b = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("a", "b"))
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other), name
    head = a.get_output_embeddings().weight
    assert head[1].norm().item() == pytest.approx(12.0, rel=1e-5)  # the end token's
    assert head[2].norm().item() < 1.0


def configuration(model) -> dict:
    return {
        "seed_everything": 0,
        "ckpt_path": "runs/old.ckpt",
        "model": {"class_path": "PolicyModule", "init_args": {"model": str(model)}},
        "data": {
            "class_path": "RLDataModule",
            "init_args": {
                "rewards": ["my.reward"], "reward_weights": [2.0], "group_size": 16,
                "groups_per_iteration": 512, "iterations_per_epoch": 100,
                "sampling": {"max_tokens": 4096},
                "engine": {"class_path": "lightning_rl.RayEngine", "init_args": {"replicas": 8}},
                "evaluation": {"limit": None, "samples": 8},
            },
        },
        "trainer": {
            "accelerator": "gpu", "devices": 8, "num_nodes": 2, "precision": "bf16-mixed",
            "max_epochs": 10, "logger": {"class_path": "WandbLogger"},
            "strategy": {
                "class_path": "lightning_rl.ShardedStrategy",
                "init_args": {"sequence": 4, "tensor": 2, "expert": 1},
            },
            "callbacks": [
                {"class_path": "HFExport", "init_args": {"push_to_hub": "me/model"}},
                {"class_path": "Evaluate", "init_args": {"every_n_iterations": 20}},
            ],
        },
    }  # fmt: skip


def test_a_small_run_is_small_local_and_says_what_it_leaves_out(big_model, tmp_path):
    notes = []
    big = configuration(big_model)
    before = json.dumps(big)
    small = Smaller(big, tmp_path, notes.append).make()
    assert json.dumps(big) == before
    assert world_size(big) == 16
    trainer, data = small["trainer"], small["data"]["init_args"]
    assert "ckpt_path" not in small
    assert (trainer["accelerator"], trainer["devices"], trainer["num_nodes"]) == ("cpu", 4, 1)
    assert trainer["strategy"]["init_args"] == {"sequence": 2, "tensor": 2, "expert": 1}
    assert trainer["precision"] == "bf16-mixed"
    export, evaluate, checkpoint = trainer["callbacks"]
    assert export["init_args"]["push_to_hub"] is None
    assert evaluate["init_args"]["every_n_iterations"] == 1
    assert checkpoint["class_path"] == "IterationCheckpoint"
    assert data["rewards"] == ["my.reward", REWARD]
    assert data["reward_weights"] == [2.0, 1.0]
    assert (data["group_size"], data["groups_per_iteration"]) == (4, 4)
    assert data["sampling"]["max_tokens"] == 32
    assert data["evaluation"] == {"limit": 4, "samples": 2}
    assert (tmp_path / "model_0" / "model.safetensors").is_file()
    untried = {finding.key for finding in notes if finding.kind is Kind.UNTRIED}
    assert untried == {
        "ckpt_path", "trainer.devices", "trainer.logger", "trainer.callbacks.HFExport",
        "data.engine",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "used", "untried"),
    [
        (32, "32-true", False),
        ("bf16-true", "bf16-true", False),
        ("16-mixed", "bf16-mixed", True),
        ("transformer-engine", "32-true", True),
    ],
)
def test_the_precision_is_the_runs_where_a_cpu_has_it(given, used, untried, big_model, tmp_path):
    notes, tree = [], configuration(big_model)
    tree["trainer"]["precision"] = given
    assert Smaller(tree, tmp_path, notes.append).make()["trainer"]["precision"] == used
    assert ("trainer.precision" in {note.key for note in notes}) == untried


@pytest.mark.parametrize(
    ("name", "given", "used"),
    [
        ("CollectiveTransport", {"backend": "nccl", "host": "10.0.0.1", "keep_copy": False},
         {"backend": "gloo", "host": "127.0.0.1", "keep_copy": False}),
        ("CheckpointTransport", {"directory": "/shared", "keep": 3}, {"keep": 3}),
        ("NCCLTransport", {}, None),
    ],
)  # fmt: skip
def test_servers_get_weights_as_in_the_run(name, given, used, big_model, tmp_path):
    notes, tree = [], configuration(big_model)
    servers = {"replicas": 8, "tensor_parallel_size": 4, "max_model_len": 64}
    tree["data"]["init_args"]["engine"] = {"class_path": "VLLMServer", "init_args": servers}
    transport = {"class_path": f"lightning_rl.{name}", "init_args": given}
    sync = {"class_path": "WeightSync", "init_args": {"transport": transport}}
    tree["trainer"]["callbacks"] = [sync]
    small = Smaller(tree, tmp_path, notes.append).make()
    engine = small["data"]["init_args"]["engine"]
    assert engine == {"class_path": "VLLMServer", "init_args": {"max_model_len": 64}}
    made = small["trainer"]["callbacks"][0]["init_args"]["transport"]
    if used is None:
        assert made is None
        assert "trainer.callbacks.WeightSync" in {note.key for note in notes}
        return
    if name == "CheckpointTransport":
        used = used | {"directory": str(tmp_path / "weights")}
    assert made == {"class_path": name, "init_args": used}


def test_a_supervised_run_is_cut_to_as_many_updates(big_model, tmp_path):
    tree = configuration(big_model)
    tree["data"] = {"class_path": "SFTDataModule", "init_args": {"batch_size": 64}}
    tree["trainer"] |= {"accumulate_grad_batches": 4, "enable_checkpointing": False}
    trainer = Smaller(tree, tmp_path, [].append).make()["trainer"]
    assert (trainer["limit_train_batches"], trainer["limit_val_batches"]) == (12, 2)
    assert trainer["enable_checkpointing"]


def test_a_planned_run_has_all_sizes_and_reads_no_weights(big_model):
    planned = without_weights(configuration(big_model))
    assert planned["data"] == configuration(big_model)["data"]
    assert planned["model"]["init_args"]["loading"] == {"random_init": True}
    assert planned["trainer"]["max_epochs"] == 10


def test_equal_tokens_get_equal_rewards_by_chance():
    ids = [[n, n + 1] for n in range(64)]
    rewards = by_chance(["?"] * 64, ids)
    assert rewards == by_chance(["?"] * 64, ids)
    assert set(rewards) == {0.0, 1.0}


def test_tools_are_called_as_a_model_would():
    def doubled(number: int) -> int:
        """Double a number.

        Args:
            number: any.
        """
        return 2 * number

    async def stuck(text: str) -> str:
        """Never return.

        Args:
            text: any.
        """
        import asyncio

        await asyncio.sleep(3600)
        return text

    sound, blocked = try_tools(Toolbox([doubled, stuck], call_timeout=0.1))
    assert (sound.kind, sound.text) == (Kind.TRIED, "doubled answers")
    assert blocked.kind is Kind.FAILS
    assert "stuck did not return within call_timeout=0.1 s" in blocked.text


def test_a_run_is_told_what_its_judge_reads_writes_and_costs():
    tokenizer = make_tokenizer()
    judge = OpenAIJudge("http://127.0.0.1:9/v1", "judge", options={"max_tokens": 20})
    rewards = Rewards([exact_match, LLMJudge(judge, question="123{completion}")])
    task = Task("", IterablePrompts(["12"]), SingleTurn(), rewards, Sampling(max_tokens=10), 4, 1.0)
    question = len(tokenizer.encode("123{completion}"))
    prompts = [Prompt("0", "12", [1, 2]), Prompt("1", "1234", [1, 2, 3, 4])]
    groups, (read, written) = 250_000, (question + 3 + 10, 20)  # a million completions
    [finding] = judge_costs(task, prompts, tokenizer, groups, Prices(2.0, 0.5))
    assert "judge asks a service 1,000,000 times in a run" in finding.text
    assert f"reads {1e6 * read:.2g} tokens and writes 2e+07 at most" in finding.text
    assert f": {2.0 * read + 0.5 * written:,.2f} at 2 and 0.5 a million" in finding.text
    [unpriced] = judge_costs(task, prompts, tokenizer, groups, None)
    assert unpriced.text == finding.text.rpartition(":")[0]


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ([], 0),
        ([Kind.TRIED, Kind.UNTRIED], 0),
        ([Kind.WASTES, Kind.TRIED], 1),
        ([Kind.TRIED, Kind.FAILS, Kind.WASTES], 2),
    ],
)
def test_the_worst_finding_is_the_status(kinds, status):
    verdict = RunVerdict(
        "a.yaml", [RunFinding(kind, "data.rewards", "<b> is wrong") for kind in kinds]
    )
    assert verdict.status == status
    text, page = "\n".join(verdict.lines()), verdict.page()
    for kind in kinds:
        assert f"{kind.value}:\n  - data.rewards: <b> is wrong" in text
        assert f"<h3>{kind.value}</h3><ul><li><code>data.rewards</code> &lt;b&gt; is" in page
