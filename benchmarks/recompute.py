"""Measure what recomputed layers keep and cost: planned and measured peak, and CPU seconds.

    OMP_NUM_THREADS=1 python -m benchmarks.recompute [--tokens 200] [--save]

A small model's forward and backward pass on one micro-batch, on the CPU, beside the gradients of a
micro-batch before it; every allocation of torch is followed. What stands for host memory is not
torch's own, so that it counts as little as with CUDA. The last line is JSON; ``--save`` also writes
the table of docs/gpu.md.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.support.allocations import peak_while
from benchmarks.support.results import parser_of, report, write_block
from lightning_rl import Loading, Recompute
from lightning_rl.cli.check.batches import largest_rollouts
from lightning_rl.cli.check.memory import training_memory
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models import input_offloading
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.tiny_models import save_random_model

NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "vocab_size": 16,
}
"""A model whose activations outweigh its weights."""
SETTINGS: dict[str, bool | Recompute] = {
    "false": False,
    "true": True,
    "{every: 2}": Recompute(every=2),
    "{keep: attention}": Recompute(keep="attention"),
    "{inputs: host}": Recompute(inputs="host"),
    "{mlp_tokens: 200}": Recompute(mlp_tokens=200),
    "{inputs: host, mlp_tokens: 200}": Recompute(inputs="host", mlp_tokens=200),
    "{every: 2, keep: attention, inputs: host, mlp_tokens: 200}": Recompute(
        2, "attention", "host", 200
    ),
}
"""The settings of ``gradient_checkpointing``, as YAML has them."""
TIMES = 5
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"


def micro_batch_of(tokens: int) -> TensorDict:
    """Micro-batch two groups of four completions of so many tokens."""
    prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(2)]
    return pack_rollouts(largest_rollouts(prompts, 2, 4, tokens))


@contextmanager
def uncounted_host() -> Iterator[None]:
    """Hide host memory from torch's allocator."""

    def memory(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.empty(tensor.shape, np.float32))

    with patch.object(input_offloading, "host_memory", memory):
        yield


def measure(model: str, setting: bool | Recompute, micro_batch: TensorDict) -> dict[str, Any]:
    """Return planned and measured device bytes, host bytes, and the fastest pass's seconds."""
    policy = Policy(model, loading=Loading(gradient_checkpointing=setting))
    plan = training_memory(policy, [], torch.optim.AdamW, micro_batch)

    def passes() -> float:
        begin = time.process_time()
        policy(micro_batch).logprobs.sum().backward()
        return time.process_time() - begin

    with uncounted_host():
        seconds = min(passes() for _ in range(TIMES))
        peak = peak_while(passes)
    before = plan.sum_of("weights", "gradients", "optimizer")
    return {
        "planned": plan.total,
        "measured": peak + before,
        "host": sum(plan.host.values()),
        "seconds": round(seconds, 3),
    }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return Markdown, a setting a line."""
    lines = [
        "| `gradient_checkpointing` | planned, MiB | measured, MiB | on the host, MiB | CPU s |",
        "|---|---|---|---|---|",
    ]
    for name, row in found.items():
        sizes = " | ".join(f"{row[of] / 2**20:.2f}" for of in ("planned", "measured", "host"))
        lines.append(f"| `{name}` | {sizes} | {row['seconds']:.2f} |")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=200, help="of each of eight completions")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        save_random_model(Path(directory), make_tokenizer(), **NARROW)
        micro_batch = micro_batch_of(given.tokens)
        found = {
            name: measure(directory, setting, micro_batch) for name, setting in SETTINGS.items()
        }
    print("\n".join(table(found)))
    if given.save:
        write_block(PAGE, "recompute", table(found))
    report("recompute", found, given.save)


if __name__ == "__main__":
    main()
