"""How far do routers part an engine from its trainer, and does a replay bring them together?

    OMP_NUM_THREADS=1 python -m benchmarks.experts [--updates 200] [--save]

A Qwen3-MoE with random weights (two layers of eight experts, two a token) learns by GRPO to write
many different digits, once as it is and once with ``RolloutRouting``; in bfloat16 (engine, and
trainer by autocast) and in float32. After the updates the last weights are pushed, 256 rollouts are
written, and scored.

The last line is JSON, of bfloat16: ``gap`` and ``gap_replayed`` are the mean differences of a
token's logprobs between engine and trainer in nats, of the same weights and rollouts, without and
with the engine's experts; ``gap_max`` and ``gap_max_replayed`` the largest. ``other_experts`` is
the share of tokens for which the trainer's routers would choose another set in any layer.
``trained`` are the same figures for the policy that was trained with the replay, ``float32`` those
of float32. ``reward`` is the mean at the end. ``--save`` also writes the table into
docs/experts.md.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.support.results import parser_of, report, write_block
from benchmarks.support.task import sampled
from lightning_rl import PolicyModule, RLDataModule, Sampling, TransformersEngine, UpdateSettings
from lightning_rl.callbacks import WeightSync
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.extend import RolloutRouting
from lightning_rl.rollout import Prompt
from recipes.sort_digits.prepare import make_tokenizer

SAMPLING = Sampling(max_tokens=12)
PAGE = Path(__file__).parents[1] / "docs" / "experts.md"


def save_model(directory: Path) -> None:
    """Save the mixture, with the tokenizer of digits."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
        initializer_range=0.1, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def different_digits(completions: list[str], **_: Any) -> list[float]:
    """Reward the number of different digits, of ten. There are many ways to write them, so the
    policy keeps its entropy.
    """
    return [len({letter for letter in text if letter.isdigit()}) / 10 for text in completions]


@torch.no_grad()
def gaps(module: PolicyModule, engine: TransformersEngine, mixed: bool) -> dict[str, float]:
    """Return the gaps of the module's weights, once the engine has them."""
    policy = module.loaded_policy
    engine.load_weights(policy.named_weights(), engine.version + 1)
    found: dict[str, float] = {}
    prompts = [Prompt(str(n), "", [3 + n % 10, 3 + n // 10, 2]) for n in range(64)]
    batch = pack_rollouts(sampled(engine, prompts, SAMPLING, seed=0))
    for suffix, replays in (("", False), ("_replayed", True)):
        policy.replays = replays
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            scores = policy(batch)
        apart = (scores.logprobs - batch["tokens", "rollout_logprobs"][scores.live]).abs()
        found |= {f"gap{suffix}": float(apart.mean()), f"gap_max{suffix}": float(apart.max())}
    assert scores.router_outputs is not None
    return found | {"other_experts": float(scores.router_outputs.otherwise)}


def trained(model: Path, dtype: str, replays: bool, updates: int) -> dict[str, Any]:
    """Return a policy's gaps after so many updates, and the reward that it gets."""
    engine = TransformersEngine(dtype, device="cpu", routed_experts=True)
    datamodule = RLDataModule(
        IterablePrompts([{"prompt": f"{n}="} for n in range(10, 74)], seed=1),
        rewards=[different_digits],
        engine=engine,
        sampling=SAMPLING,
        group_size=8,
        groups_per_iteration=8,
        iterations_per_epoch=updates // 2,
        seed=7,
    )
    module = PolicyModule(
        str(model),
        optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.0),
        routing_replay=RolloutRouting() if replays else None,
        update=UpdateSettings(minibatches=2, seed=7),
    )
    mixed = dtype != "float32"
    with tempfile.TemporaryDirectory() as place:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            precision="bf16-mixed" if mixed else "32-true",
            callbacks=[WeightSync()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=place,
        )
        trainer.fit(module, datamodule)
        reward = float(trainer.callback_metrics["reward/mean"])
    engine.start(model)
    try:
        return gaps(module, engine, mixed) | {"reward": reward}
    finally:
        engine.close()


def measure(updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        model = Path(place)
        save_model(model)
        results = {}
        for dtype in ("bfloat16", "float32"):
            results[dtype] = trained(model, dtype, False, updates)
            results[dtype]["trained"] = trained(model, dtype, True, updates)
            print(dtype, results[dtype], flush=True)
    return results["bfloat16"] | {"float32": results["float32"], "updates": updates}


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown with the gaps, without and with the replay."""
    rows = {
        "bfloat16": result,
        "bfloat16, trained with the replay": result["trained"],
        "float32": result["float32"],
    }
    lines = [
        "| nats per token | mean gap | largest | replayed: mean | largest |",
        "|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        cells = [
            nats(found[f"{key}{suffix}"], style)
            for suffix in ("", "_replayed")
            for key, style in (("gap", ".4f"), ("gap_max", "#.2g"))
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def nats(gap: float, style: str) -> str:
    """Format nats in this style, or with an exponent where that would show nothing but zeros."""
    return f"{gap:{style if gap > 1e-4 else '.1e'}}".replace("e-0", "e-")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--updates", type=int, default=200)
    arguments = parser.parse_args()
    result = measure(arguments.updates)
    if arguments.save:
        write_block(PAGE, "experts", table(result))
    report("experts", result, arguments.save)


if __name__ == "__main__":
    main()
