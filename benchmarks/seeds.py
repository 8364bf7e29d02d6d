"""Does a recipe reach 0.90 with every seed, and at what cost?

    python -m benchmarks.seeds --config recipes/sort_digits/grpo.yaml --seeds 0 1 2

Runs the recipe once per seed (a process each) and prints, per seed, the first evaluated iteration
with held-out accuracy of at least 0.90, the CPU seconds of the whole fit, and accuracy before and
after. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GOAL = 0.90


def run(config: str, seed: int, overrides: list[str]) -> dict[str, float | None]:
    """One run in a process of its own; raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "lightning_rl", "fit", "--config", config]
        command += ["--seed_everything", str(seed)]
        command += ["--trainer.logger.init_args.save_dir", directory, *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        (summary_file,) = Path(directory).rglob("summary.json")
        summary = json.loads(summary_file.read_text())
        lines = summary_file.with_name("metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
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
