"""The run of sort_digits, killed three times, beside the same run that nothing stopped.

    python -m recipes.sort_digits.quickstart
    python -m benchmarks.kill_picture [--out docs/images/killed.png]

Both are `lightning-rl fit --config recipes/sort_digits/grpo.yaml --ckpt_path last`, with a
checkpoint every iteration. One gets a SIGKILL while it collects, in a backward pass, and while it
saves a checkpoint; each time the same command is given again. The picture shows the reward by
iteration. The last line is JSON: `equal` is true where weights, optimizer, random states, metrics
(but times) and rollouts are the same to the last bit.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.kill.compare import compare, run_directory
from benchmarks.kill.killer import Point, armed
from benchmarks.kill.runs import run_command
from benchmarks.support.colours import INK

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "runs" / "sort_digits" / "sft" / "hf"
KILLS = {
    "while it collects": Point("collect", 6, 0.5),
    "in a backward pass": Point("backward", 13, 0.0),
    "while it saves": Point("save", 20, 0.0),
}
COLLECTING_S = 0.3
"""Of which a share passes before the SIGKILL: an iteration collects for longer."""
PROCESSES = ("#174a7e", "#d9822b", "#3a9474", "#b03a5b")


def configuration(out: Path) -> dict[str, Any]:
    """The quickstart's, with a checkpoint every iteration and its logs in ``out``."""
    config: dict[str, Any] = yaml.safe_load(
        (ROOT / "recipes" / "sort_digits" / "grpo.yaml").read_text()
    )
    trainer = config["trainer"]
    trainer["logger"]["init_args"] = {"save_dir": str(out), "name": "run"}
    every = {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 1}}
    unseen = ("RLProgressBar", "HFExport")
    kept = [c for c in trainer["callbacks"] if c["class_path"] not in unseen]
    trainer |= {"enable_progress_bar": False, "callbacks": [*kept, every]}
    return config


def rewards(out: Path) -> list[float]:
    """The mean reward of every iteration so far; an evaluation before the first has none."""
    lines = (run_directory(out) / "metrics.jsonl").read_text().splitlines()
    rows = (json.loads(line) for line in lines)
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def killed_run(out: Path) -> list[int]:
    """A run through all of KILLS; how many iterations were done when each process ended."""
    ends = []
    for place, point in KILLS.items():
        status = run_command(armed(configuration(out), point, COLLECTING_S), out)
        if status != -signal.SIGKILL:
            raise SystemExit(f"killed {place}, it ended with {status}: {out}/output.txt")
        ends.append(len(rewards(out)))
        print(f"killed {place}, after {ends[-1]} iterations", flush=True)
    whole_run(out)
    return [*ends, len(rewards(out))]


def whole_run(out: Path) -> None:
    """To its end."""
    status = run_command(configuration(out), out)
    if status != 0:
        raise SystemExit(f"it ended with {status}: {out}/output.txt")


def draw(whole: list[float], resumed: list[float], ends: list[int], path: Path) -> None:
    """The uninterrupted run as a line, the killed one as dots, a colour for each process."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    iterations = range(1, len(whole) + 1)
    axes.plot(iterations, whole, color="#c3ccd5", linewidth=7, label="never stopped")
    begin = 0
    for number, (end, color) in enumerate(zip(ends, PROCESSES, strict=True), 1):
        label = f"process {number}"
        axes.plot(iterations[begin:end], resumed[begin:end], "o", color=color, label=label)
        begin = end
    for end, place in zip(ends, KILLS, strict=False):
        axes.axvline(end + 0.5, color=INK, linewidth=1, linestyle=":")
        axes.text(end + 0.6, 0.02, f"kill -9\n{place}", color=INK, fontsize=9,
                  transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_xlabel("iteration", color=INK)
    axes.set_ylabel("mean reward", color=INK)
    axes.set_title("Killed three times, gone on: the same run, bit for bit",
                   loc="left", fontsize=12, fontweight="bold", color=INK)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw a run that was killed three times.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "killed.png")
    path = parser.parse_args().out
    if not MODEL.is_dir():
        make = "python -m recipes.sort_digits.quickstart"
        raise SystemExit(f"there is no warm-started model in {MODEL}; make it by `{make}`")
    with tempfile.TemporaryDirectory(prefix="killed_") as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        whole_run(whole)
        ends = killed_run(killed)
        found = compare(killed, whole, iterations=ends[-1])
        if not found:
            draw(rewards(whole), rewards(killed), ends, path)
    result = {"kills": len(KILLS), "iterations": ends[-1], "equal": not found, "differences": found}
    print(json.dumps(result))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
