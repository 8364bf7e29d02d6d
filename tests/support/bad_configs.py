"""List what can be wrong with a configuration, and what is said about it.

    python -m tests.support.bad_configs            writes the table into docs/api/mistakes.md

Each case is what a command line adds to a good configuration, and what its message must hold.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import save_random_model

PAGE = Path(__file__).parents[2] / "docs" / "api" / "mistakes.md"
BEGIN, END = "<!-- bad configurations -->", "<!-- end -->"

REWARDS = """
def length(completions, **columns):
    return [float(len(c)) for c in completions]

def needs_solution(completions, solution):
    return [0.0 for c in completions]

def too_few(completions, **columns):
    return [0.0]

def words(completions, **columns):
    return ["good" for c in completions]
"""

CONFIG: dict[str, Any] = {
    "model": {
        "class_path": "PolicyModule",
        "init_args": {
            "model": "model",
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        },
    },
    "data": {
        "class_path": "RLDataModule",
        "init_args": {
            "train_prompts": {"class_path": "JSONLPrompts", "init_args": {"path": "train.jsonl"}},
            "evaluation": {
                "prompts": {"class_path": "JSONLPrompts", "init_args": {"path": "train.jsonl"}}
            },
            "rewards": ["my_rewards.length"],
            "engine": {"class_path": "TransformersEngine", "init_args": {"device": "cpu"}},
            "sampling": {"max_tokens": 4},
            "group_size": 2,
            "groups_per_iteration": 4,
            "iterations_per_epoch": 1,
        },
    },
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 1,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "enable_checkpointing": False,
        "callbacks": [{"class_path": "WeightSync"}, {"class_path": "Evaluate"}],
    },
}

SECTIONS: dict[str, dict[str, list[str]]] = {
    "typos": {
        "--trainer.max_epoch 3": ["trainer.max_epoch: no such key", "did you mean max_epochs?"],
        "--model.update.ppo_epoch 2": [
            "model.init_args.update.ppo_epoch: no such key",
            "did you mean ppo_epochs?",
        ],
        "--data.group_sizes 8": ["data.init_args.group_sizes", "did you mean group_size?"],
        "--data.sampling.max_token 4": [
            "sampling.max_token: no such key",
            "did you mean max_tokens?",
        ],
        "--modle PolicyModule": ["modle: no such key", "did you mean model?"],
        "--model.optimizer.weight_dekay 0": ["no such key in AdamW", "did you mean weight_decay?"],
        "--model.advantage.lam 0.9": ["no such key in GRPO", "it is a key of GAE"],
        "--data.engine VLLMLocl": ["engine.class_path", "did you mean VLLMLocal?"],
        "--model.advantage GPRO": ["advantage.class_path", "did you mean GRPO?"],
        "--trainer.callbacks+=Evalute": ["callbacks[2].class_path", "did you mean Evaluate?"],
        "--data.rewards+=my_rewards.lenght": [
            "rewards[1]",
            "my_rewards has no 'lenght'",
            "did you mean length?",
            "my_rewards.py",
        ],
        "--data.rewards+=no_rewards.length": ["there is no module 'no_rewards'", "PYTHONPATH"],
    },
    "wrong types": {
        "--data.group_size eight": ["group_size: expected int, got 'eight'"],
        "--data.sampling.temperature hot": ["temperature: expected float, got 'hot'"],
        "--model.optimizer.lr fast": ["lr: expected float", "got 'fast'"],
        "--trainer.precision bf16-mixd": ["expected one of", "bf16-mixed", "got 'bf16-mixd'"],
        "--data.sampling 5": [
            "sampling: expected keys of Sampling (e.g. {max_tokens: 256}), got 5"
        ],
        "--data.sampling [max_tokens]": ["keys of Sampling", "got ['max_tokens']"],
        "--model.lora true": ["lora: expected keys of LoRA (e.g. {rank: 16}) or null, got True"],
        "--data.rewards my_rewards.length": ["rewards: expected a list", "my_rewards.length"],
        "--model.loss torch.nn.MSELoss": ["torch.nn.MSELoss is not a PolicyLoss"],
    },
    "files": {
        "--config nope.yaml": ["nope.yaml: there is no such file"],
        "--config twice.yaml": ["twice.yaml:3: data is set twice", "line 1"],
        "--ckpt_path nope.ckpt": ["ckpt_path: 'nope.ckpt' does not exist"],
        "--ckpt_path train.jsonl": ["train.jsonl is damaged", "or not a checkpoint"],
        "--model.model ./nope": ["model='./nope': there is no such directory"],
        "--model.model ./own_code": ["comes with code of its own", "trust_remote_code: true"],
        "--model.model ./empty": ["model='./empty': cannot load a tokenizer"],
        "--model.model ./no_eos": ["model='./no_eos' has no eos_token", "set one"],
        "--data.train_prompts.path nope.jsonl": ["path='nope.jsonl' does not exist"],
        "--data.train_prompts.path broken.jsonl": [
            "broken.jsonl:2: expected one JSON object per line"
        ],
        "--data.train_prompts.path empty.jsonl": ["holds no rows", "expected at least one"],
        "--data.train_prompts.path chat.jsonl": ["chat template"],
        "--data.train_prompts.prompt_column text": ["train.jsonl:1", "'text'"],
        "--data.train_prompts.max_prompt_tokens 1": ["max_prompt_tokens=1"],
    },
    "out of range": {
        "--data.group_size 0": ["group_size=0 must be >= 1"],
        "--data.group_size 1": ["group_size=1 must be >= 2 for GRPO", "raise it, or use GAE"],
        "--data.groups_per_iteration -4": ["groups_per_iteration=-4 must be >= 1"],
        "--data.iterations_per_epoch 0": ["iterations_per_epoch=0 must be >= 1"],
        "--data.selection.max_batches 0": ["selection.max_batches=0 must be >= 1"],
        "--data.max_failed_share 2": ["max_failed_share=2"],
        "--data.evaluation.samples 0": ["evaluation.samples=0 must be >= 1"],
        "--data.reward_weights [1,2]": ["reward_weights", "2"],
        "--data.sampling.max_tokens 0": ["sampling.max_tokens=0 must be >= 1"],
        "--data.sampling.max_tokens 128": ["sampling.max_tokens=128 leaves no room", "128 tokens"],
        "--data.sampling.min_tokens 9": ["sampling.min_tokens=9 must be in [0, max_tokens]"],
        "--data.sampling.temperature -1": [
            "sampling.temperature=-1",
            "0 (greedy), or finite and >= 0.01",
        ],
        "--data.sampling.top_p 1.5": ["sampling.top_p=1.5 must be in (0, 1]"],
        "--data.sampling.top_k -1": ["sampling.top_k=-1 must be >= 0"],
        "--data.sampling.min_p 2": ["sampling.min_p=2.0 must be in [0, 1]"],
        "--data.sampling.repetition_penalty 0": ["repetition_penalty=0.0 must be > 0"],
        "--data.sampling.presence_penalty 3": ["presence_penalty=3.0 must be in [-2, 2]"],
        "--data.sampling.frequency_penalty -3": ["frequency_penalty=-3.0 must be in [-2, 2]"],
        "--model.lora LoRA --model.lora.options '{lora_dropout: 0.1}'": [
            "lora.options.lora_dropout=0.1",
            "at random",
        ],
        "--model.lora LoRA --model.lora.options '{lora_bias: true}'": [
            "lora.options.lora_bias=True cannot be merged"
        ],
        "--data.engine.dtype float8": ["engine dtype='float8' must be float32"],
        "--data.engine.max_batch_size 0": ["max_batch_size=0 must be >= 1"],
        "--data.engine.device gpu": ["device='gpu'"],
        "--data.collector SyncCollector --data.collector.max_concurrency 0": [
            "max_concurrency=0 must be >= 1"
        ],
        "--data.collector AsyncCollector --data.collector.max_staleness -1": ["max_staleness=-1"],
        "--data.collector StreamedCollector --data.collector.max_groups_in_flight 0": [
            "max_groups_in_flight=0 must be >= 1"
        ],
        "--model.update.minibatches 0": ["minibatches=0 must be >= 1"],
        "--model.update.minibatches 5": ["minibatches=5 exceeds groups_per_iteration=4"],
        "--model.update.ppo_epochs 0": ["ppo_epochs=0 must be >= 1"],
        "--model.update.max_tokens_per_micro_batch 0": [
            "max_tokens_per_micro_batch=0 must be >= 1"
        ],
        "--model.update.max_grad_norm -1": [
            "max_grad_norm=-1",
            "must be > 0",
            "null for no clipping",
        ],
        "--model.optimizer.lr -1.0": ["Invalid learning rate: -1.0"],
        "--model.optimizer.lr .inf": ["optimizer.lr=inf must be finite"],
        "--data.reward_weights [.nan]": ["reward_weights=[nan] must be finite"],
        "--data.sampling.temperature .inf": ["temperature=inf must be 0 (greedy), or finite"],
        "--data.sampling.temperature 0.005": [
            "temperature=0.005",
            "vLLM raises lower ones to that",
        ],
        "--model.optimizer torch.optim.LBFGS": ["optimizer=LBFGS", "use AdamW"],
        "--seed_everything 4294967296": ["must be in [0, 4294967295]"],
        "--model.loss.clip_low -0.1": ["clip_low=-0.1"],
        "--model.loss.clip_low 1.5": ["clip_low=1.5"],
        "--model.kl K3Penalty --model.kl.coef -1": ["coef=-1"],
        "--model.entropy EntropyBonus --model.entropy.coef .nan": ["coef=nan"],
        "--model.entropy.coef LinearSchedule --model.entropy.coef.start 1 "
        "--model.entropy.coef.final 0 --model.entropy.coef.iterations 0": [
            "iterations=0 must be >= 1"
        ],
        "--model.critic.head SharedValueHead --model.critic.lr -1": [
            "critic.lr=-1",
            "must be >= 0",
        ],
        "--model.lora LoRA --model.lora.rank 0": ["lora.rank=0 must be >= 1"],
        "--model.lora.quantization NF4 --model.lora.quantization.block_size 48": [
            "NF4.block_size=48 must be one of 32, 64"
        ],
        "--model.lora LoRA --model.lora.target_modules [nope]": ["target_modules=['nope']"],
        "--model.lr_scheduler WarmupLinear --model.lr_scheduler.total_steps 3 "
        "--model.lr_scheduler.warmup_steps 5": ["total_steps=3 must be > warmup_steps=5"],
        "--trainer.callbacks+=Evaluate --trainer.callbacks.every_n_iterations 0": [
            "every_n_iterations=0"
        ],
        "--trainer.callbacks+=WeightSync --trainer.callbacks.max_gap 0": [
            "max_gap=0",
            "must be > 0",
        ],
        "--trainer.accelerator cpuu": ["accelerator='cpuu'", "cuda"],
        "--trainer.devices 0": ["devices"],
        "--trainer.max_epochs -2": ["max_epochs"],
    },
    "settings that contradict each other": {
        "--data.sampling.structured_outputs.regex '[0-9]+'": [
            "sampling.structured_outputs={'regex': '[0-9]+'}",
            "data.evaluation only",
        ],
        "--data.evaluation.sampling.structured_outputs '{regex: a, choice: [b]}'": [
            "structured_outputs has ['choice', 'regex']; give exactly one"
        ],
        "--data.chat_template_kwargs '{enable_thinking: false}'": [
            "chat_template_kwargs.enable_thinking: the tokenizer has no chat template"
        ],
        "--model.loading.model_kwargs '{attn_implementation: sdpa}'": [
            "model_kwargs.attn_implementation cannot be set",
            "an attention of the library's own",
        ],
        "--model.loading.model_kwargs '{dtype: bfloat16}'": [
            "model_kwargs.dtype",
            "trainer.precision",
        ],
        "--model.advantage GAE": ["advantage=GAE needs a critic", "SharedValueHead"],
        "--model.advantage PassAtK --model.kl_reward K3Penalty": [
            "advantage=PassAtK needs the reward as it was graded",
            "set kl instead",
        ],
        "--model.critic.head SharedValueHead --model.critic.warmup_iterations 3": [
            "critic.warmup_iterations=3 needs an advantage that reads values"
        ],
        "--model.reference FrozenReference": ["reference=FrozenReference is not used by any KL"],
        "--model.update.use_rollout_logprobs true --model.correction TokenTIS": [
            "nothing to correct"
        ],
        "--data.evaluation null": ["Evaluate has nothing to evaluate on", "data.evaluation"],
        "--trainer.callbacks+=WeightSync": ["there are 2 WeightSync", "remove all but one"],
        "--trainer.callbacks+=RunReport --trainer.callbacks+=RunReport": [
            "there are 2 RunReport",
            "remove all but one",
        ],
        "--data.collector AsyncCollector --trainer.callbacks '[{class_path: WeightSync, "
        "init_args: {schedule: {class_path: FixedSchedule, "
        "init_args: {every_n_iterations: 3}}}}]'": [
            "schedule=FixedSchedule(every_n_iterations=3) of WeightSync",
            "up to 2 versions behind",
            "max_staleness=1; sync every 2 iterations or more often, or raise max_staleness to 2",
        ],
        "--data.collector StreamedCollector --model.advantage ReinforcePlusPlus": [
            "model's ReinforcePlusPlus may need the whole batch",
            "use SyncCollector, or parts that need one group",
        ],
        "--data.collector StreamedCollector --model.update.max_tokens_per_micro_batch auto": [
            "model.update.max_tokens_per_micro_batch=auto is measured on a complete batch"
        ],
        "--data.collector StreamedCollector --data.selection.filters+=RewardSpread "
        "--model.update.minibatches 2": [
            "data.selection.filters leaves open which groups are in the first of several "
            "model.update.minibatches"
        ],
        "--trainer.enable_checkpointing true --trainer.callbacks+=IterationCheckpoint "
        "--trainer.callbacks.monitor eval/acuracy": [
            "IterationCheckpoint(monitor='eval/acuracy'): no such metric was recorded",
            "did you mean eval/accuracy?",
            "The recorded metrics are eval/accuracy",
        ],
        "--data.selection.filters+=RewardSpread --data.group_size 1 --model.advantage GAE "
        "--model.critic.head SharedValueHead": ["group_size=1 must be >= 2 for RewardSpread"],
        "--data.demonstrations.prompts train.jsonl --data.demonstrations.per_iteration 1": [
            "set model.loss: SFTMix"
        ],
        "--data.agent ToolAgent --data.agent.tools+=my_rewards.length": [
            "'length' cannot be a tool",
            "docstring",
        ],
        "--data.agent.turns 3": ["agent.turns: no such key in SingleTurn"],
        "--data SFTDataModule": ["data.init_args.train: is missing; SFTDataModule needs it"],
        "--model SFTModule": [
            "RLDataModule works with a PolicyModule or RolesModule, not SFTModule"
        ],
    },
    "rewards, found when the first rollouts are graded": {
        "--data.rewards [my_rewards.needs_solution]": [
            "reward needs_solution",
            "missing 1 required positional argument: 'solution'",
        ],
        "--data.rewards [my_rewards.too_few]": [
            "reward too_few",
            "returned 1 scores for 2 completions",
        ],
        "--data.rewards [my_rewards.words]": ["reward words: returned 'good'", "a finite number"],
    },
    "configurations of strangers": {
        "--trusted_only": ["my_rewards.length", "--trust my_rewards"],
        "--trust my_rewards --model.loading.trust_remote_code true": [
            "model.init_args.loading.trust_remote_code: True runs code that comes with a model"
        ],
        "--trust my_rewards --data.rewards+=os.system": [
            "os.system",
            "not among the trusted modules",
        ],
    },
}

CASES = {case: words for section in SECTIONS.values() for case, words in section.items()}


def furnish(place: Path, model: Path | None = None) -> None:
    """Put into a directory all that the configuration and the cases name."""
    rows = [json.dumps({"prompt": f"{n}=", "answer": str(n)}) + "\n" for n in range(30, 42)]
    (place / "train.jsonl").write_text("".join(rows))
    (place / "broken.jsonl").write_text(rows[0] + '{"prompt": "3=\n')
    (place / "empty.jsonl").write_text("\n")
    chat = {"prompt": [{"role": "user", "content": "3="}]}
    (place / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    (place / "twice.yaml").write_text("data: {}\n\ndata: {}\n")
    (place / "my_rewards.py").write_text(REWARDS)
    sys.modules.pop("my_rewards", None)  # another test's may have the same name
    (place / "good.yaml").write_text(yaml.safe_dump(CONFIG))
    (place / "empty").mkdir()
    if model is not None:
        (place / "model").symlink_to(model, target_is_directory=True)
    own = json.loads((place / "model" / "config.json").read_text())
    own |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (place / "own_code").mkdir()
    (place / "own_code" / "config.json").write_text(json.dumps(own))
    (place / "own_code" / "own.py").write_text("raise RuntimeError('this must not run')\n")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(place / "model")
    tokenizer.save_pretrained(place / "own_code")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(place / "no_eos")


def files(place: Path) -> dict[Path, int]:
    """Return the files that lie there, and when each was written."""
    return {p: p.stat().st_mtime_ns for p in place.rglob("*") if "__pycache__" not in p.parts}


def make_model(directory: Path) -> None:
    """Make a model as small as one can be, for the table, where no test has made one."""
    from recipes.sort_digits.prepare import make_tokenizer

    sizes: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 128}
    save_random_model(directory, make_tokenizer(), vocab_size=16, **sizes)


def arguments(case: str, config: str = "good.yaml") -> list[str]:
    """Return the arguments of the command line."""
    return ["fit", "--config", config, *shlex.split(case)]


def complaint(case: str, config: str = "good.yaml") -> tuple[int, str]:
    """Return the exit status, and stderr from our name on, in the furnished directory."""
    from lightning_rl.cli import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments(case, config))
    text = said.getvalue()
    begin = text.find("lightning-rl: ")
    return status, text[begin:].strip() if begin >= 0 else f"nothing was refused: {case}"


def table() -> str:
    """Format all cases as Markdown."""
    lines = []
    for section, cases in SECTIONS.items():
        lines += ["", f"### {section.capitalize()}", ""]
        lines += ["| added to a good configuration | what is said |", "|---|---|"]
        for case in cases:
            lines.append(row(case, complaint(case)[1]))
    return "\n".join(lines).strip()


_CHANGING = {
    "prompt '.*?', completion '.*?'": "prompt '...', completion '...'",
    r"version_\d+": "version_0",
}
"""Patterns of what differs from run to run, and what the table shows instead."""


def row(case: str, message: str) -> str:
    """Return the case's line of the table."""
    for found, instead in _CHANGING.items():
        message = re.sub(found, instead, message)
    return f"| `{case}` | {_cell(message.removeprefix('lightning-rl: ').splitlines()[0])} |"


def shown() -> str:
    """Return the table as the page has it."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def _cell(text: str) -> str:
    for here in (os.path.realpath(Path.cwd()), str(Path.cwd())):
        text = text.replace(here, "/home/you/project")
    for character in "|<*_`":
        text = text.replace(character, f"\\{character}")
    return text


def main() -> None:
    """Write the table between its markers."""
    with TemporaryDirectory() as place, contextlib.chdir(place):
        make_model(Path("model"))
        furnish(Path())
        sys.path.insert(0, place)
        made = table()
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
