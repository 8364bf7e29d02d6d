"""Does a recipe reach 0.90 with every seed, and at what cost?

    python -m benchmarks.seeds --config recipes/sort_digits/grpo.yaml --seeds 0 1 2

Runs the recipe once per seed (a process each) and prints, per seed, the first evaluated iteration
with held-out accuracy of at least 0.90, the CPU seconds of the whole fit, and accuracy before and
after. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOAL = 0.90


def fitted(
    config: str, seed: int, overrides: list[str]
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Return summary and metrics of one run, in a process of its own.

    Raises:
        RuntimeError: if it fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "lightning_rl", "fit", "--config", config]
        command += ["--seed_everything", str(seed)]
        command += ["--trainer.logger.init_args.save_dir", directory, *overrides]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-2000:]}")
        (summary,) = Path(directory).rglob("summary.json")
        lines = summary.with_name("metrics.jsonl").read_text().splitlines()
        return json.loads(summary.read_text()), [json.loads(line) for line in lines]


def run(config: str, seed: int, overrides: list[str]) -> dict[str, float | None]:
    """Return the line of one seed."""
    summary, rows = fitted(config, seed, overrides)
    reached = [r["iteration"] for r in rows if r.get("eval/accuracy", 0.0) >= GOAL]
    return {
        "seed": seed,
        "iterations_to_goal": reached[0] if reached else None,
        "cpu_s": summary["cpu_s"],
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="recipes/sort_digits/grpo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, overrides = parser.parse_known_args()
    rows = []
    print("seed  iterations to 0.90  CPU s  before  after")
    for seed in arguments.seeds:
        row = run(arguments.config, seed, overrides)
        rows.append(row)
        print(
            f"{seed:<5} {row['iterations_to_goal']!s:<19} {row['cpu_s']:<6.1f} "
            f"{row['accuracy_before']:.3f}   {row['accuracy_after']:.3f}",
            flush=True,
        )
    print(json.dumps({"config": arguments.config, "runs": rows}))


if __name__ == "__main__":
    main()
