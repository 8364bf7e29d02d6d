"""How fast do weights get to another process, against moving the same bytes plainly?

    OMP_NUM_THREADS=1 python -m benchmarks.sync [--millions 1 100] [--vllm] [--save]

Float32 weights of layers like a transformer's go to one process. Each transport is measured beside
its floor, in turns, in one run; once until the other process has the weights in its memory (where
an engine's loader begins), and once until it has copied them into weights of its own:

- `memory`: a copy of the same bytes from one tensor to another;
- `checkpoint`: a copy of a file of that size, with fsync;
- `collective`: one gloo broadcast of one tensor of that size.

Seconds are the least of some rounds. The last line is JSON: floor / ours (without the second copy)
for the size nearest to 100 million parameters. Beside: what it takes to push a LoRA of rank 16
alone, until the other process has merged it, and how much of that merging is. With `--vllm`, also
seconds to a real vLLM server, loading included.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.results import parser_of, report
from benchmarks.sync.transports import NAMES, measure, measure_vllm

ROUNDS = 5


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 100])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--vllm", action="store_true", help="also push to a real vLLM server")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for millions in arguments.millions:
        with tempfile.TemporaryDirectory(dir=".", prefix=".sync_") as directory:
            rows[f"{millions:g}M"] = measure(millions, Path(directory), arguments.rounds)
            if arguments.vllm:
                rows[f"{millions:g}M"]["vllm_seconds"] = measure_vllm(
                    millions, Path(directory), arguments.rounds
                )
    for size, row in rows.items():
        print(f"\n{size}: {row['parameters']:,} parameters, float32")
        for name in NAMES:
            r = row[name]
            vllm = row.get("vllm_seconds", {}).get(name)
            print(
                f"  {name:<12}{r['seconds']:8.3f} s {r['gb_per_s']:6.2f} GB/s, floor "
                f"{r['floor_gb_per_s']:6.2f} GB/s: {r['ratio']:.2f}, copied "
                f"{r['copied_ratio']:.2f}" + ("" if vllm is None else f"; to vLLM {vllm:.3f} s")
            )
        a = row["adapters"]
        seconds = (f"{name} {a[name]:.3f} s" for name in NAMES)
        print(
            f"  adapters alone: {a['bytes'] / 1e6:.2f} MB ({a['share']:.1%}), merging included "
            f"{', '.join(seconds)}; merging here {a['merging']:.3f} s"
        )
        if "vllm_seconds" in row:
            print(f"  adapters alone to vLLM, in memory: {row['vllm_seconds']['adapters']:.3f} s")
    nearest = rows[f"{min(arguments.millions, key=lambda m: abs(m - 100)):g}M"]
    ratios = {name: nearest[name]["ratio"] for name in NAMES}
    report("sync", ratios | {"sizes": rows}, arguments.save)


if __name__ == "__main__":
    main()
