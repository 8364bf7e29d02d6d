"""Run the recipe as its users start it, and the tests in ``tests/gpu``."""

import io
import json
import subprocess
import sys
import time
from contextlib import redirect_stderr

from benchmarks.gpu.bench import Bench, last_lines
from benchmarks.gpu.made import warm_model
from benchmarks.gpu.runner import ROOT
from lightning_rl.cli import main as lightning_rl_command
from recipes.sort_digits.prepare import prepare

CONFIGS = ROOT / "recipes" / "sort_digits"


def three_iterations(bench: Bench) -> None:
    """Warm start and three iterations of GRPO with ``VLLMLocal``, from the command line."""
    warm = warm_model(bench)
    out = warm.parents[1]
    prepare(out)
    if bench.tiny:
        for rows in out.glob("*.jsonl"):
            rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:64]))
    small = ["--data.groups_per_iteration=2", "--data.evaluation.limit=2"] if bench.tiny else []
    steps = 5 if bench.tiny else 1500
    _run(
        bench,
        "warm start",
        f"--config={CONFIGS / 'sft.yaml'}",
        f"--model.model={out / 'model'}",
        f"--data.train.path={out / 'sft.jsonl'}",
        f"--trainer.max_steps={steps}",
        f"--trainer.logger.save_dir={out}",
        f"--trainer.callbacks.directory={warm}",
    )
    _run(
        bench,
        "grpo",
        f"--config={CONFIGS / 'grpo.yaml'}",
        f"--model.model={warm}",
        f"--data.train_prompts.path={out / 'train.jsonl'}",
        f"--data.evaluation.prompts.path={out / 'heldout.jsonl'}",
        "--data.iterations_per_epoch=3",
        f"--trainer.logger.save_dir={out}",
        *small,
    )
    summary = json.loads((out / "grpo" / "version_0" / "summary.json").read_text())
    bench.note(
        {name: summary[name] for name in ("iterations", "accuracy_before", "accuracy_after")}
    )
    gaps = {name: value for name, value in summary["metrics"].items() if "gap" in name}
    times = {name: value for name, value in summary["metrics"].items() if name.startswith("time/")}
    bench.note(gaps | times)
    bench.require(summary["iterations"] == 3, f"it ended after {summary['iterations']} iterations")


def _run(bench: Bench, name: str, *arguments: str) -> None:
    """Run ``lightning-rl fit``; what it prints is kept in this process's output."""
    accelerator = "cpu" if bench.device == "cpu" else "auto"
    begin = time.perf_counter()
    with redirect_stderr(io.StringIO()) as printed:
        status = lightning_rl_command(["fit", *arguments, f"--trainer.accelerator={accelerator}"])
    print(printed.getvalue(), flush=True)
    bench.note({f"{name} s": time.perf_counter() - begin})
    if status:
        raise RuntimeError(f"{name} ended with {status}: {last_lines(printed.getvalue())}")


def tests(bench: Bench) -> None:
    """Run ``pytest tests/gpu``; where there is no GPU, it skips them all."""
    command = [
        sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rf", "-p", "no:cacheprovider",
    ]  # fmt: skip
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    print(result.stdout, result.stderr, sep="\n", flush=True)
    outcome = result.stdout.strip().splitlines()
    bench.note({"pytest": outcome[-1] if outcome else "printed nothing"})
    bench.require(result.returncode == 0, last_lines(result.stdout + result.stderr))
