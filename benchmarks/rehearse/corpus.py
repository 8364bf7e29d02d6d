"""Configurations of which a rehearsal should find the fault, and sound ones that it should pass."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from recipes.calculator.prepare import make_chat_tokenizer, prepare

Tree = dict[str, Any]
PARTS = "benchmarks.rehearse.parts"
ITERATIONS = 100


@dataclass(frozen=True)
class Case:
    """A configuration: the base's after ``change``, which may also write files to a folder.

    A rehearsal should name ``key`` in a finding that makes its status at least 1; None: it should
    find nothing.
    """

    name: str
    change: Callable[[Tree, Path], None]
    key: str | None = None


def prepare_all(folder: Path) -> None:
    """Write the model, and 400 and 40 rows of questions, to a folder."""
    prepare(folder / "data")
    for name, count in (("train", 400), ("heldout", 40)):
        lines = (folder / f"data/{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]))


def base(folder: Path) -> Tree:
    """Return a sound configuration for 100 iterations."""
    rows = {"class_path": "JSONLPrompts", "init_args": {"path": str(folder / "train.jsonl")}}
    held_out = {"class_path": "JSONLPrompts", "init_args": {"path": str(folder / "heldout.jsonl")}}
    return {
        "model": {
            "class_path": "PolicyModule",
            "init_args": {"model": str(folder / "data/model")},
        },
        "data": {
            "class_path": "RLDataModule",
            "init_args": {
                "train_prompts": rows,
                "evaluation": {"prompts": held_out},
                "rewards": [f"{PARTS}.right"],
                "engine": "TransformersEngine",
                "sampling": {"max_tokens": 64},
                "groups_per_iteration": 16,
                "group_size": 8,
                "iterations_per_epoch": ITERATIONS,
            },
        },
        "trainer": {
            "accelerator": "auto",
            "devices": 1,
            "max_epochs": 1,
            "enable_progress_bar": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder / "runs")}},
            "callbacks": [
                {"class_path": "Evaluate", "init_args": {"every_n_iterations": 10}},
                {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 10}},
                {"class_path": "HFExport"},
            ],
        },
    }


def tree_of(case: Case, folder: Path) -> Tree:
    """Return a case's configuration."""
    tree = copy.deepcopy(base(folder))
    case.change(tree, folder)
    return tree


def _set(key: str, value: Any) -> Callable[[Tree, Path], None]:
    """Return a change of one argument: ``data.sampling.temperature``, say."""
    section, *names = key.split(".")

    def change(tree: Tree, folder: Path) -> None:
        node = tree[section] if section == "trainer" else tree[section]["init_args"]
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = value

    return change


def _all(*changes: Callable[[Tree, Path], None]) -> Callable[[Tree, Path], None]:
    def change(tree: Tree, folder: Path) -> None:
        for one in changes:
            one(tree, folder)

    return change


def _reward(name: str, *more: Callable[[Tree, Path], None]) -> Callable[[Tree, Path], None]:
    return _all(_set("data.rewards", [f"{PARTS}.{name}"]), *more)


def _callback(name: str, **arguments: Any) -> Callable[[Tree, Path], None]:
    """Add a callback, or set arguments of the one that is there."""

    def change(tree: Tree, folder: Path) -> None:
        callbacks = tree["trainer"]["callbacks"]
        known = [one for one in callbacks if one["class_path"] == name]
        if not known:
            callbacks.append({"class_path": name, "init_args": arguments})
        for one in known:
            one["init_args"] = one.get("init_args", {}) | arguments

    return change


def _rows(
    change_row: Callable[[int, Tree], Tree], count: int = 400
) -> Callable[[Tree, Path], None]:
    """Train on changed rows."""

    def change(tree: Tree, folder: Path) -> None:
        lines = (folder / "train.jsonl").read_text().splitlines()[:count]
        rows = [change_row(place, json.loads(line)) for place, line in enumerate(lines)]
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree["data"]["init_args"]["train_prompts"]["init_args"]["path"] = str(file)

    return change


def _user(text: str) -> list[Tree]:
    return [{"role": "user", "content": text}]


def _held_out_rows(tree: Tree, folder: Path) -> None:
    prompts = tree["data"]["init_args"]["evaluation"]["prompts"]["init_args"]
    prompts["path"] = str(folder / "train.jsonl")
    tree["data"]["init_args"]["evaluation"]["limit"] = 40


def _big(tree: Tree, folder: Path) -> None:
    """Train a model of seven billion parameters, of which there is only the configuration."""
    place = folder / "big"
    make_chat_tokenizer().save_pretrained(place)
    Qwen2Config(
        vocab_size=128, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    ).save_pretrained(place)  # fmt: skip
    tree["model"]["init_args"]["model"] = str(place)


def _no_tokenizer(tree: Tree, folder: Path) -> None:
    place = folder / "bare"
    place.mkdir(exist_ok=True)
    source = folder / "data/model/config.json"
    (place / "config.json").write_text(source.read_text())
    tree["model"]["init_args"]["model"] = str(place)


def _schedule(kind: str, **arguments: Any) -> Callable[[Tree, Path], None]:
    return _set("model.lr_scheduler", {"class_path": kind, "init_args": arguments})


def _agent(kind: str, **arguments: Any) -> Callable[[Tree, Path], None]:
    return _set("data.agent", {"class_path": kind, "init_args": arguments})


def _rewriting(tree: Tree, folder: Path) -> None:
    """Use a chat template that shows earlier turns in another way."""
    tokenizer = make_chat_tokenizer()
    template = tokenizer.chat_template
    assert isinstance(template, str)
    shortened = "{{ message.content if loop.last else message.content[:1] }}"
    tokenizer.chat_template = template.replace("{{ message.content }}", shortened)
    place = folder / "rewriting"
    place.mkdir(exist_ok=True)
    tokenizer.save_pretrained(place)
    for name in ("config.json", "model.safetensors"):
        (place / name).write_bytes((folder / "data/model" / name).read_bytes())
    tree["model"]["init_args"]["model"] = str(place)
    _agent("MultiTurn", environment=f"{PARTS}.Endless", max_turns=3)(tree, folder)
    tree["data"]["init_args"]["rewards"] = ["lightning_rl.EnvironmentReward"]


_JUDGE = {
    "class_path": "LLMJudge",
    "init_args": {
        "judge": {
            "class_path": "OpenAIJudge",
            "init_args": {"base_url": "http://127.0.0.1:9/v1", "model": "judge"},
        }
    },
}
_WITH_KEY = copy.deepcopy(_JUDGE)
_WITH_KEY["init_args"]["judge"]["init_args"]["options"] = {"api_key": "sk-0123456789abcdefABCDEF"}  # type: ignore[index]

FAULTS = [
    Case("a reward raises on cut text", _reward("raises_without_number"), "data.rewards"),
    Case("answers of ints beside texts", _rows(
        lambda n, row: row | {"answer": int(row["answer"]) if n % 2 else row["answer"]}
    ), "data.rewards"),
    Case("a reward pays a cut answer", _reward("beginning"), "data.rewards"),
    Case("a reward pays all answers in turn", _reward("anywhere"), "data.rewards"),
    Case("a reward pays nothing at all", _reward("shorter"), "data.rewards"),
    Case("a reward depends on the order", _reward("first_of_group"), "data.rewards"),
    Case("a reward is random", _reward("with_noise"), "data.rewards"),
    Case("a slow reward", _reward("slow", _set("data.groups_per_iteration", 1024),
         _set("data.iterations_per_epoch", 200)), "data.rewards"),
    Case("a reward depends on the process", _reward("by_hash"), "data.rewards"),
    Case("rows in the order of a set", _set("data.train_prompts.class_path",
         f"{PARTS}.Unordered"), "data.train_prompts"),
    Case("a precision that policies refuse", _set("trainer.precision", "16-mixed"),
         "trainer.precision"),
    Case("a reward asks for another column", _reward("of_another_column"), "anwser"),
    Case("no server behind a judge", _set("data.rewards", [_JUDGE]), "data.rewards"),
    Case("a key in the configuration", _set("data.rewards", [f"{PARTS}.right", _WITH_KEY]),
         "api_key"),
    Case("a stop string within answers", _set("data.sampling.stop", ["1", "2", "3", "4", "5", "6",
         "7", "8", "9", "e"]), "sampling.stop"),
    Case("answers longer than max_tokens", _set("data.sampling.max_tokens", 1),
         "sampling.max_tokens"),
    Case("a success reward out of reach", _reward("half"), "success_reward"),
    Case("best by a metric of another name", _callback("IterationCheckpoint",
         monitor="eval/acuracy"), "eval/acuracy"),
    Case("a schedule that ends at a tenth", _schedule("WarmupLinear", total_steps=10),
         "lr_scheduler"),
    Case("a warm-up as long as the run", _schedule("WarmupConstant", warmup_steps=500),
         "lr_scheduler"),
    Case("three rows for 64 groups", _all(_rows(lambda n, row: row, 3),
         _set("data.groups_per_iteration", 64)), "groups_per_iteration"),
    Case("most rows are too long", _set("data.train_prompts.init_args.max_prompt_tokens", 8),
         "max_prompt_tokens"),
    Case("prompts and completions beyond the window", _set("data.sampling.max_tokens", 252),
         "sampling.max_tokens"),
    Case("held-out rows are trained on", _held_out_rows, "data.evaluation.prompts"),
    Case("rows that repeat", _rows(lambda n, row: row | {"prompt": _user(f"{n % 7}+1")}),
         "data.train_prompts"),
    Case("greedy sampling", _set("data.sampling.temperature", 0.0), "temperature"),
    Case("an evaluation larger than the training", _set("data.evaluation.samples", 64),
         "data.evaluation"),
    Case("no evaluation within the run", _callback("Evaluate", every_n_iterations=500),
         "every_n_iterations"),
    Case("no checkpoint within the run", _callback("IterationCheckpoint", every_n_iterations=500),
         "every_n_iterations"),
    Case("a full disk", _all(_big, _callback("IterationCheckpoint", every_n_iterations=1,
         keep_last=1000)), "default_root_dir"),
    Case("a model without a tokenizer", _no_tokenizer, "tokenizer"),
    Case("a tool that blocks", _agent("ToolAgent", tools=[f"{PARTS}.blocks"], call_timeout=3.0),
         "data.agent.tools"),
    Case("a filter that rejects everything", _set("data.selection", {"filters": [
         {"class_path": f"{PARTS}.Nothing"}]}), "Nothing"),
    Case("an environment that never ends", _all(_agent("MultiTurn",
         environment=f"{PARTS}.Endless", max_turns=2, max_turn_tokens=4),
         _set("data.rewards", ["lightning_rl.EnvironmentReward"])), "max_turns"),
    Case("a template that rewrites history", _rewriting, "rewrite"),
    Case("a state that cannot be saved", _callback(f"{PARTS}.Unsaved"), "generator"),
    Case("a state that cannot be loaded", _callback(f"{PARTS}.Forgetful"), "steps"),
    Case("a callback that fails at a batch's end", _callback(f"{PARTS}.Late"),
         "reward/right_answer"),
    Case("an export that transformers does not know", _callback(f"{PARTS}.Spoil"), "HFExport"),
]  # fmt: skip


def _nothing(tree: Tree, folder: Path) -> None:
    pass


_GPU = _all(
    _set("trainer.accelerator", "gpu"), _set("trainer.devices", 1),
    _set("trainer.precision", "bf16-mixed"),
    _set("data.engine", {"class_path": "VLLMLocal", "init_args": {
        "gpu_memory_utilization": 0.3, "dtype": "bfloat16"}}),
)  # fmt: skip


def _servers(transport: str, **arguments: Any) -> Callable[[Tree, Path], None]:
    """Let two servers write, to which a transport brings the weights."""
    engine = {"class_path": "VLLMServer", "init_args": {"replicas": 2}}
    pushed = {"class_path": transport, "init_args": arguments}
    return _all(_set("data.engine", engine), _callback("WeightSync", transport=pushed))


_GAE = _all(
    _set("model.advantage", {"class_path": "GAE"}),
    _set("model.critic", {"head": {"class_path": "SharedValueHead"}}),
)
_KL = {"class_path": "K3Penalty", "init_args": {"coef": 0.01}}
_SPREAD = {"filters": [{"class_path": "RewardSpread"}]}

SOUND = [
    Case("the base", _nothing),
    Case("a LoRA", _set("model.lora", {"rank": 4})),
    Case("PPO with a critic", _GAE),
    Case("dynamic sampling", _set("data.selection", _SPREAD)),
    Case("a schedule as long as the run", _schedule("WarmupLinear", total_steps=100)),
    Case("a KL penalty", _set("model.kl", _KL)),
    Case("a collector that runs ahead", _set("data.collector", {"class_path": "AsyncCollector"})),
    Case("a tool", _agent("ToolAgent", tools=["recipes.calculator.tool.calculate"])),
    Case("eight processes", _all(_set("trainer.devices", 8), _set("trainer.strategy", "ddp"))),
    Case("one GPU with vLLM", _GPU),
    Case("servers that read files", _servers("CheckpointTransport", directory="/shared/weights")),
    Case(
        "servers that get broadcasts",
        _all(
            _servers("CollectiveTransport", backend="nccl"), _set("trainer.precision", "bf16-mixed")
        ),
    ),
]
