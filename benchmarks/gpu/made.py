"""Make models and rollouts for checks: nothing is looked up anywhere."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu.bench import Bench
from benchmarks.support.task import quiet_trainer
from lightning_rl import Prompt, Rollout
from lightning_rl.extend import RolloutStatus, Row
from recipes.sort_digits.prepare import make_tokenizer

FIRST, LAST = 2, 12
"""Token ids that every tokenizer here has besides the end and padding."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model; ``spread`` is the standard deviation of its random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    spread: float = 0.02


SHAPES = {
    # Far from uniform, so that a wrong weight shows in every logprob.
    "tiny": Shape(64, 64, 2, 2, 1, 16, spread=0.2),
    "small": Shape(256, 512, 4, 4, 2, 1024, spread=0.1),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151_936),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936),
}


def shape_of(bench: Bench, name: str) -> Shape:
    """Return one of ``SHAPES``; for a trial a tiny one, with as many query heads per key."""
    shape, tiny = SHAPES[name], SHAPES["tiny"]
    if not bench.tiny:
        return shape
    return replace(tiny, vocabulary=min(shape.vocabulary, 256), spread=shape.spread)


def model_of(bench: Bench, name: str, tied: bool = True, weights: bool = False) -> Path:
    """Make a directory with configuration and tokenizer of a shape; on request with weights."""
    directory = bench.scratch / "models" / f"{name}-{'tied' if tied else 'untied'}-{weights}"
    if directory.exists():
        return directory
    shape = shape_of(bench, name)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32_768,
        initializer_range=shape.spread,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    partial_directory = directory.with_name(directory.name + ".partial")
    if weights:
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(partial_directory)
    else:
        config.save_pretrained(partial_directory)
    make_tokenizer().save_pretrained(partial_directory)
    partial_directory.replace(directory)
    return directory


def warm_model(bench: Bench) -> Path:
    """Return where the check ``recipe`` leaves the recipe's model after its warm start."""
    return bench.scratch / "sort_digits" / "sft" / "hf"


def prompts_of(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Make distinct prompts of random digits."""
    rng = random.Random(seed)
    return [[rng.randint(FIRST, LAST) for _ in range(tokens)] for _ in range(count)]


def rollouts_of(
    count: int, tokens: int, prompt_tokens: int = 64, group_size: int = 4, seed: int = 0
) -> list[Rollout]:
    """Make graded rollouts of random digits and equal lengths, in groups of one prompt."""
    rng = random.Random(seed)
    prompts = prompts_of(-(-count // group_size), prompt_tokens, seed + 1)
    return [
        Rollout(
            Prompt(str(index // group_size), "made", prompts[index // group_size]),
            group_id=str(index // group_size),
            sample_index=index % group_size,
            seed=0,
            rows=[
                Row(
                    prompts[index // group_size],
                    [rng.randint(FIRST, LAST) for _ in range(tokens)],
                    [True] * tokens,
                    [-2.0] * tokens,
                    [0] * tokens,
                )
            ],
            status=RolloutStatus.COMPLETED,
            reward=1.0 + index % 2,
        )
        for index in range(count)
    ]


def trainer_of(bench: Bench, **options: Any) -> Trainer:
    """Make a trainer on the one device, without bars, logs and files."""
    return quiet_trainer(bench.scratch, accelerator=bench.device, **options)


def adamw(lr: float) -> Any:
    """Return an optimizer factory, as modules take it."""
    return partial(torch.optim.AdamW, lr=lr, weight_decay=0.0)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, tails and maximum of absolute values."""
    sizes = torch.tensor(values, dtype=torch.float64).abs()
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    found = sizes.quantile(torch.tensor(list(at.values()), dtype=torch.float64))
    return {"mean": float(sizes.mean())} | dict(zip(at, found.tolist(), strict=True))
