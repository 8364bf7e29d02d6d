"""Measure what laying out a micro-batch costs, by the length of its rollouts.

    OMP_NUM_THREADS=1 python -m benchmarks.layout [--save]

Micro-batches of 60 rollouts of 256 tokens, 8 of 2,000, one of 16,000 and one of 32,000, a quarter
of each the prompt, which groups of 4 share where there are so many. Three ways in turns, CPU
seconds of each (medians) and the bytes of masks:

- `masked`: all completions behind a mask, and the fused kernel's segments too, as once was done
- `buckets`: what calls of SDPA need
- `varlen`: what a fused kernel needs

The last line is JSON; `--save` also writes the table into docs/gpu.md.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.support.results import parser_of, report, write_block
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.attention import batches as attention_batches
from lightning_rl.models.attention.packed import build_layout
from lightning_rl.rollout import Prompt, Rollout, Row

MICRO_BATCHES = {
    "60x256": (60, 256),
    "8x2000": (8, 2_000),
    "1x16000": (1, 16_000),
    "1x32000": (1, 32_000),
}
GROUP_SIZE = 4
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"


def make_micro_batch(count: int, tokens: int) -> TensorDict:
    """Make rollouts of equal lengths."""
    size = tokens * 3 // 4
    return pack_rollouts(
        [
            Rollout(
                Prompt(str(i // GROUP_SIZE), "", prompt_ids),
                str(i // GROUP_SIZE), i % GROUP_SIZE, seed=0,
                rows=[Row(prompt_ids, [4] * size, [True] * size, [0.0] * size, [0] * size)],
            )
            for i in range(count)
            for prompt_ids in [[i // GROUP_SIZE + 3] * (tokens - size)]
        ]
    )  # fmt: skip


def masked(micro_batch: TensorDict) -> int:
    """Lay out everything, with a mask for each completion."""
    bound, attention_batches.MAX_MASK = attention_batches.MAX_MASK, 1 << 62
    try:
        assert build_layout(micro_batch).varlen
        return masks_of(micro_batch)
    finally:
        attention_batches.MAX_MASK = bound


def masks_of(micro_batch: TensorDict) -> int:
    """Return bytes of the masks for SDPA."""
    parts = build_layout(micro_batch).batches.parts
    return sum(0 if part.mask is None else part.mask.nbytes for part in parts)


def varlen(micro_batch: TensorDict) -> int:
    """Lay out a micro-batch for a fused kernel, which needs no mask."""
    assert build_layout(micro_batch).varlen
    return 0


WAYS: dict[str, Callable[[TensorDict], int]] = {
    "masked": masked, "buckets": masks_of, "varlen": varlen,
}  # fmt: skip


def measure(micro_batch: TensorDict, repeats: int) -> dict[str, float]:
    """Return medians of CPU seconds, and bytes of masks."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    sizes: dict[str, int] = {}
    for repeat in range(repeats):
        for name in list(WAYS)[:: 1 if repeat % 2 else -1]:
            begin = time.process_time()
            sizes[name] = WAYS[name](micro_batch)
            seconds[name].append(time.process_time() - begin)
    row = {f"{name}_s": statistics.median(taken) for name, taken in seconds.items()}
    ratios = {f"{name}_ratio": row["masked_s"] / row[f"{name}_s"] for name in ("buckets", "varlen")}
    return row | ratios | {f"{name}_mask_mib": size / 2**20 for name, size in sizes.items()}


def table(result: dict[str, dict[str, float]]) -> list[str]:
    """Return Markdown, a line per micro-batch."""
    return [
        "| rollouts x tokens | a mask for each, s | masks, MiB | for SDPA, s | masks, MiB "
        "| for the fused kernel, s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name.replace('x', ' x ')} | {row['masked_s']:.2g} | {row['masked_mask_mib']:.3g} "
            f"| {row['buckets_s']:.2g} | {row['buckets_mask_mib']:.3g} | {row['varlen_s']:.2g} |"
            for name, row in result.items()
        ),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    print(f"{'shape':>8} " + "".join(f"{name + ', s':>12}{'masks, MiB':>12}" for name in WAYS))
    for name, shape in MICRO_BATCHES.items():
        row = result[name] = measure(make_micro_batch(*shape), arguments.repeats)
        cells = (f"{row[f'{way}_s']:12.4f}{row[f'{way}_mask_mib']:12.1f}" for way in WAYS)
        print(f"{name:>8} " + "".join(cells))
    report("layout", result, arguments.save)
    if arguments.save:
        write_block(PAGE, "layout", table(result))


if __name__ == "__main__":
    main()
