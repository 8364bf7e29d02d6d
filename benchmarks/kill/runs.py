"""Configure the run that is killed, of texts, programs or pictures, and its rewards."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL.Image import Image

from benchmarks.support import forked
from lightning_rl.rollout import Message, as_text
from lightning_rl.vision.loading import decode
from tests.support.tiny_vision import picture, save_vision_model

ITERATIONS, PER_EPOCH, GROUPS, GROUP_SIZE = 6, 3, 4, 4


def configuration(
    data: Path,
    out: Path,
    collector: str,
    engine: str,
    program: bool = False,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Return the run, as a YAML file would say it."""
    model = {
        "model": str(data / "model"),
        "advantage": {"class_path": "GAE"},
        "critic": {"head": {"class_path": "SharedValueHead"}},
        "kl": {"class_path": "K3Penalty", "init_args": {"coef": {
            "class_path": "AdaptiveCoefficient", "init_args": {"value": 0.05, "target": 1e-4}}}},
        "reference": {"class_path": "PeriodicReference", "init_args": {"every_n_iterations": 2}},
        "correction": {"class_path": "TokenTIS"},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "lr_scheduler": {"class_path": "WarmupCosine",
                         "init_args": {"warmup_steps": 2, "total_steps": 24}},
        "update": {"minibatches": 2, "ppo_epochs": 2},
    }  # fmt: skip
    if quantization is not None:
        model["lora"] = {"rank": 4, "quantization": quantization}
    # One request after another, because what comes at the same time is chance with programs, and
    # others in a batch change the last bits of logprobs.
    started = {
        "VLLMLocal": {"max_model_len": 32},
        "TransformersEngine": {"device": "cpu", "max_batch_size": 1 if program else 256},
    }[engine]
    options = {
        "train_prompts": {"class_path": "JSONLPrompts",
                          "init_args": {"path": str(data / "train.jsonl")}},
        "evaluation": {
            "prompts": {"class_path": "JSONLPrompts",
                        "init_args": {"path": str(data / "heldout.jsonl")}},
            "limit": 4,
        },
        "rewards": ["recipes.sort_digits.reward.exact_match",
                    "benchmarks.kill.runs.distinct_digits"],
        "engine": {"class_path": engine, "init_args": started},
        "collector": {"class_path": collector},
        "sampling": {"max_tokens": 10},
        "groups_per_iteration": GROUPS, "group_size": GROUP_SIZE,
        "iterations_per_epoch": PER_EPOCH,
    }  # fmt: skip
    if program:
        script = str(Path(__file__).with_name("program.py"))
        arguments = {"script": script, "preload": ["urllib.request"]}
        options["agent"] = {"class_path": "ScriptAgent", "init_args": arguments}
    callbacks: list[Any] = [
        {"class_path": "WeightSync"},
        {"class_path": "Evaluate", "init_args": {"every_n_iterations": 2}},
        {"class_path": "PreviewTable", "init_args": {"num_rollouts": GROUPS * GROUP_SIZE}},
        {"class_path": "RunReport"},
        {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 1}},
    ]
    return {
        "seed_everything": 0,
        "model": {"class_path": "PolicyModule", "init_args": model},
        "data": {"class_path": "RLDataModule", "init_args": options},
        "trainer": {
            "accelerator": "cpu", "devices": 1, "max_epochs": ITERATIONS // PER_EPOCH,
            "enable_model_summary": False, "enable_progress_bar": False,
            "logger": {"class_path": "TensorBoardLogger",
                       "init_args": {"save_dir": str(out), "name": "run"}},
            "callbacks": callbacks,
        },
    }  # fmt: skip


LEARNERS = {
    "sft": ("SFTModule", "SFTDataModule"),
    "dpo": ("DPOModule", "PairDataModule"),
    "kto": ("KTOModule", "KTODataModule"),
    "reward_model": ("RewardModelModule", "RewardPairDataModule"),
}
"""Module and data module of supervised training, by the value of ``--learner``."""


def prepare_rows(folder: Path) -> None:
    """Write rows from which each supervised learner can learn: three steps an epoch."""
    for name, numbers in (("rows", range(20)), ("heldout_rows", range(20, 26))):
        rows = (
            {"prompt": f"{n}=", "completion": "7" * (1 + n % 4), "chosen": "7" * (1 + n % 3),
             "rejected": "12"[n % 2], "label": n % 2 == 0}
            for n in numbers
        )  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def supervised_configuration(data: Path, out: Path, learner: str) -> dict[str, Any]:
    """Return a supervised run: two epochs, steps of two batches, a validation after each epoch."""
    module, data_module = LEARNERS[learner]
    rows = {
        key: {"class_path": "JSONLPrompts", "init_args": {"path": str(data / f"{name}.jsonl")}}
        for key, name in (("train", "rows"), ("val", "heldout_rows"))
    }
    model = {
        "model": str(data / "model"),
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "lr_scheduler": {"class_path": "WarmupCosine",
                         "init_args": {"warmup_steps": 2, "total_steps": ITERATIONS}},
    }  # fmt: skip
    every = {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 1}}
    return {
        "seed_everything": 0,
        "model": {"class_path": module, "init_args": model},
        "data": {"class_path": data_module, "init_args": {**rows, "batch_size": 4}},
        "trainer": {
            "accelerator": "cpu", "devices": 1, "max_epochs": ITERATIONS // PER_EPOCH,
            "accumulate_grad_batches": 2, "gradient_clip_val": 1.0,
            "enable_model_summary": False, "enable_progress_bar": False,
            "logger": {"class_path": "TensorBoardLogger",
                       "init_args": {"save_dir": str(out), "name": "run"}},
            "callbacks": [every],
        },
    }  # fmt: skip


def distinct_digits(completions: list[str | list[Message]], **columns: Any) -> list[float]:
    """Reward digits as an untrained model can earn it, so that advantages are not all zero."""
    return [len(set(as_text(completion))) / 10 for completion in completions]


def with_killed_programs(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the same run, whose programs are killed too."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    agent = changed["data"]["init_args"]["agent"]["init_args"]
    (out / "programs").mkdir(parents=True)
    agent["env"] = {"KILL_DIR": str(out / "programs")}
    return changed


def prepare_pictures(folder: Path) -> None:
    """Make a tiny model that sees, and questions about pictures of three sizes."""
    save_vision_model(folder / "model", "qwen3_vl")
    for name, seeds in (("train", range(16)), ("heldout", range(16, 20))):
        lines = []
        for seed in seeds:
            decode(picture(seed, 32 + 16 * (seed % 3))).save(folder / f"{seed}.png")
            parts = [{"type": "image", "image": f"{seed}.png"}, {"type": "text", "text": "What?"}]
            lines.append(json.dumps({"prompt": [{"role": "user", "content": parts}]}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))


def with_pictures(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same run with pictures; all that sees is trained."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    vision = {"train_tower": True, "train_projector": True, "tower_lr": 1e-4}
    changed["model"]["init_args"]["vision"] = vision
    changed["data"]["init_args"]["rewards"] = ["benchmarks.kill.runs.even_and_bright"]
    return changed


def even_and_bright(
    completion_ids: list[list[int]], pictures: list[Sequence[Image]]
) -> list[float]:
    """Reward what an untrained model can earn and that depends on what it saw."""
    light = [images[0].convert("L").getpixel((9, 9)) / 255 for images in pictures]  # type: ignore[operator]
    even = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    return [share * bright for share, bright in zip(even, light, strict=True)]


def run_command(config: dict[str, Any], out: Path, *options: str) -> int:
    """Run ``lightning-rl fit --ckpt_path last`` in a process of its own; return its exit status."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    arguments = ["fit", "--config", out / "config.yaml", "--ckpt_path", "last", *options]
    return forked.run("lightning_rl", arguments, out / "output.txt")


@contextmanager
def folder_of(keep: Path | None, prefix: str) -> Iterator[Path]:
    """Yield a folder for the runs: ``keep``, or, if none is given, one that is deleted."""
    out = (keep or Path(tempfile.mkdtemp(prefix=prefix))).resolve()
    try:
        yield out
    finally:
        if keep is None:
            shutil.rmtree(out)
