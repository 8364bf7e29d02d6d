"""Run a warm start and GRPO with vLLM, and report what came of them.

    python -m recipes.sort_digits.quickstart

Each step is a command that you can run by itself; it is printed before it runs. The quickstart runs
this where it cannot download a model.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OUT = Path("runs/sort_digits")
CONFIGS = Path("recipes/sort_digits")
# No vLLM plugins: an installed torchrl would load its own and change how processes start.
# One OpenMP thread: a second one hardly helps so small a model, and SmolLM2 has two processes.
ENVIRONMENT = {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


def main(arguments: Sequence[str]) -> int:
    """Run all steps; returns 0 if held-out accuracy ends at 0.80 or more, or not all were run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sft_steps", type=int, help="of the warm start; default: sft.yaml's")
    parser.add_argument("--iterations", type=int, help="of GRPO; default: grpo.yaml's")
    given = parser.parse_args(arguments)
    begin = time.perf_counter()
    run("recipes.sort_digits.prepare", "--out", str(OUT))
    if (OUT / "sft" / "hf" / "config.json").exists():
        print(f"\nwarm-started model found in {OUT / 'sft' / 'hf'}; delete it to make it again")
    else:
        fit("sft.yaml", "--trainer.max_steps", given.sft_steps)
    engine = () if find_spec("vllm") is not None else ("--data.engine", "TransformersEngine")
    fit("grpo.yaml", "--data.iterations_per_epoch", given.iterations, *engine)
    accuracy = report(newest_run(OUT / "grpo"), time.perf_counter() - begin)
    whole = given.sft_steps is None and given.iterations is None
    if whole and accuracy < 0.80:
        print(f"accuracy {accuracy:.3f} is below the 0.80 that this recipe should reach")
        return 1
    return 0


def fit(config: str, option: str, number: int | None, *options: str) -> None:
    """Train as a configuration says, but for a number, if it is given, and ``options``."""
    changed = [] if number is None else [option, str(number)]
    run("lightning_rl", "fit", "--config", str(CONFIGS / config), *changed, *options)


def run(module: str, *arguments: str) -> None:
    """Run ``python -m module`` and stop with its exit status if it fails."""
    print(f"\n$ python -m {shlex.join([module, *arguments])}", flush=True)
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, env=ENVIRONMENT | os.environ)
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which saves
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, own)
    if status:
        sys.exit(status)


def newest_run(directory: Path) -> Path:
    """Return the last ``version_N`` that a logger made in ``directory``."""
    return max(directory.glob("version_*"), key=lambda path: int(path.name.split("_")[1]))


def report(directory: Path, seconds: float) -> float:
    """Show rollouts of the first and the last iteration, and the outcome; returns accuracy."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    lines = (directory / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    rollouts = [json.loads(line) for line in lines]
    first, last = (
        [r for r in rollouts if r["iteration"] == rollouts[end]["iteration"]] for end in (0, -1)
    )
    print("\nThe model knew three ways to answer; only ascending order was rewarded.")
    for title, shown in (("first", first), ("last", last)):
        print(f"\n  {title} iteration: prompt, completion, reward")
        for rollout in shown[:: max(1, len(shown) // 4)][:4]:
            prompt = rollout["prompt"]["prompt"]
            print(f"    {prompt:<10} {rollout['completion']:<12} {rollout['reward']:g}")
    tell_outcome(directory, summary, seconds)
    return float(summary["accuracy_after"])


def tell_outcome(directory: Path, summary: Mapping[str, Any], seconds: float) -> None:
    """Print accuracy and seconds of a run, and where everything lies."""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(
        f"\nheld-out accuracy, sampled at temperature 1: {before:.3f} before, {after:.3f} after "
        f"{summary['iterations']} iterations\n"
        f"GRPO took {summary['wall_s']:.0f} s ({summary['cpu_s']:.0f} CPU s) on "
        f"{summary['device']}; everything together {seconds:.0f} s\n\n"
        f"  summary   {directory / 'summary.json'}\n"
        f"  curves    {directory / 'curves.png'}\n"
        f"  rollouts  {directory / 'rollouts.jsonl'}\n"
        f"  model     {directory / 'hf'}   (for AutoModelForCausalLM.from_pretrained and vLLM)\n"
        f"  logs      tensorboard --logdir {directory.parent}\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
