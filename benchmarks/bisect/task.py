"""The task of the benchmark: three digits to be sorted by a model of 80,000 parameters, that was
shown three ways to answer; an iteration takes a fraction of a second.
"""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from recipes.sort_digits.prepare import STRATEGIES, complete, make_tokenizer, small_qwen2

TRAINED, HELD_OUT = 96, 400
SHAPE = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
STEPS, BATCH, END = 400, 64, 1


def prepare(folder: Path) -> None:
    """Write the model, warm-started, and the prompts, unless they are there."""
    if (folder / "model").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    prompts = ["".join(digits) + "=" for digits in product("0123456789", repeat=3)]
    random.Random(0).shuffle(prompts)
    rows = [{"prompt": prompt, "answer": complete(prompt, "ascending")} for prompt in prompts]
    parts = {"train": rows[:TRAINED], "held_out": rows[-HELD_OUT:]}
    thirds = {f"set_{n}": rows[:TRAINED][n::3] for n in range(3)}
    for name, part in (parts | thirds).items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    model, tokenizer = small_qwen2(**SHAPE), make_tokenizer()
    _warm_start(model, tokenizer, prompts[:-HELD_OUT])
    tokenizer.save_pretrained(folder / "partial")
    model.save_pretrained(folder / "partial")
    (folder / "partial").rename(folder / "model")


def _warm_start(model: Any, tokenizer: Any, prompts: list[str]) -> None:
    """Imitate the three ways to answer, each in its share of the answers."""
    rng, names = random.Random(0), list(STRATEGIES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS):
        drawn = rng.choices(prompts, k=BATCH)
        ways = rng.choices(names, list(STRATEGIES.values()), k=BATCH)
        texts = [prompt + complete(prompt, way) for prompt, way in zip(drawn, ways, strict=True)]
        ids = torch.tensor([[*tokenizer.encode(text), END] for text in texts])
        logits = model(input_ids=ids).logits[:, 3:-1]  # from the "=" on
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def config_of(folder: Path, seed: int, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a sound run; ``changes`` are of its data module."""
    held_out = {
        "name": "held_out",
        "prompts": str(folder / "held_out.jsonl"),
        "rewards": ["recipes.sort_digits.reward.exact_match"],
    }
    data = {
        "train_prompts": str(folder / "train.jsonl"),
        "rewards": ["recipes.sort_digits.reward.exact_match"],
        "engine": {"class_path": "TransformersEngine", "init_args": {"device": "cpu"}},
        "sampling": {"max_tokens": 6},
        "groups_per_iteration": 16,
        "group_size": 8,
        "iterations_per_epoch": 20,
        "evaluation": {"prompts": {"class_path": "Mixture", "init_args": {"sets": [held_out]}}},
    }
    return {
        "seed_everything": seed,
        "model": {
            "class_path": "PolicyModule",
            "init_args": {
                "model": str(folder / "model"),
                "optimizer": {
                    "class_path": "torch.optim.AdamW",
                    "init_args": {"lr": 2e-3, "weight_decay": 0.0},
                },
            },
        },
        "data": {"class_path": "RLDataModule", "init_args": data | changes},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": {
                "class_path": "CSVLogger",
                "init_args": {"save_dir": "runs", "name": "", "version": 0},
            },
            "callbacks": [
                {"class_path": "WeightSync"},
                {"class_path": "RunReport"},
                {"class_path": "Evaluate", "init_args": {"every_n_iterations": 2}},
                {
                    "class_path": "IterationCheckpoint",
                    "init_args": {"every_n_iterations": 4, "keep_last": 5},
                },
            ],
        },
    }


def write_config(file: Path, config: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(config, sort_keys=False))
