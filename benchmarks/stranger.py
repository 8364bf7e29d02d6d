"""Play a stranger's first hour, from the wheel alone: ``python -m benchmarks.stranger``.

In a fresh environment, in a folder that has nothing to do with this checkout, as a user would:

1. install the wheel and all that it asks for, as the README says;
2. `lightning-rl doctor`, and `lightning-rl quickstart`;
3. a configuration of one's own: prompts from a dataset of a hub, a reward in a file, an export that
   is pushed to the hub; `lightning-rl check` of it;
4. train with it, kill that with SIGKILL in the middle, and give the command again;
5. load what was pushed from the hub.

The hub is on the loopback (tests/support), read and written by the real clients. Each step's wall
seconds are printed; the last line is JSON. What is downloaded may come from uv's cache.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.hub_writes import WritableHub

ROOT = Path(__file__).parents[1]
TOKEN = "hf_of_a_stranger"
ITERATIONS = 12
REWARD = """
def largest_first(completions, solution):
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]
"""
CONFIGURATION = """
model:
  init_args:
    model: runs/sort_digits/sft/hf
data:
  init_args:
    train_prompts:
      class_path: HFDatasetPrompts
      init_args:
        path: stranger/digits
        split: train
        columns: {solution: answer}
        template: "{{ question }}="
    evaluation:
      prompts:
        class_path: HFDatasetPrompts
        init_args:
          path: stranger/digits
          split: test
          columns: {solution: answer}
          template: "{{ question }}="
    rewards: [my_rewards.largest_first]
trainer:
  logger: {class_path: TensorBoardLogger, init_args: {save_dir: runs, name: mine}}
  callbacks:
    - {class_path: Evaluate, init_args: {every_n_iterations: 4}}
    - {class_path: IterationCheckpoint, init_args: {every_n_iterations: 1}}
    - {class_path: HFExport, init_args: {push_to_hub: me/largest-first}}
    - RunReport
"""
LOADED = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("me/largest-first")
tokens = AutoTokenizer.from_pretrained("me/largest-first")("273=", return_tensors="pt")
print(model.generate(**tokens, do_sample=False, max_new_tokens=4).tolist())
"""


class Stranger:
    """Runs commands in a folder and an environment of its own, and times them."""

    def __init__(self, folder: Path, hub: WritableHub) -> None:
        self.here = folder / "here"
        self.here.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON"))}
        self.environment = kept | {
            "PATH": f"{self.here / '.venv' / 'bin'}:{os.environ['PATH']}",
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "hf"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
        }
        self.seconds: dict[str, float] = {}

    def does(self, step: str, *command: str) -> str:
        """Run a command to its end; return what it printed.

        Raises:
            SystemExit: if it fails.
        """
        begun = time.perf_counter()
        done = subprocess.run(
            command, cwd=self.here, env=self.environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.seconds[step] = round(time.perf_counter() - begun, 1)
        if done.returncode:
            print(done.stdout[-4000:])
            raise SystemExit(f"{step}: {' '.join(command)} ended with {done.returncode}")
        print(f"{self.seconds[step]:>7.1f} s  {step}", flush=True)
        return done.stdout

    def starts_and_kills(self, step: str, iterations: int, *command: str) -> None:
        """Run a command and kill it with SIGKILL as soon as its run has done some iterations."""
        begun = time.perf_counter()
        with (self.here / "killed.txt").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.here, env=self.environment, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            while self.iterations() < iterations and process.poll() is None:
                time.sleep(0.05)
            if process.poll() is not None:
                raise SystemExit(
                    f"{step}: it ended before: {(self.here / 'killed.txt').read_text()}"
                )
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.seconds[step] = round(time.perf_counter() - begun, 1)
        print(f"{self.seconds[step]:>7.1f} s  {step}", flush=True)

    def iterations(self) -> int:
        """Return how many iterations the run has saved."""
        saved = (self.here / "runs" / "mine").glob("*/checkpoints/iteration_*.ckpt")
        return max((int(path.stem.rpartition("_")[2]) for path in saved), default=0)


def digits(first: int, count: int) -> bytes:
    """Return rows of questions and answers, as a dataset has them."""
    rng = random.Random(first)
    questions = ["".join(rng.choices("0123456789", k=rng.randint(3, 5))) for _ in range(count)]
    rows = ({"question": q, "answer": "".join(sorted(q, reverse=True))} for q in questions)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def install(stranger: Stranger, wheel: Path) -> None:
    """Install as the README says; torch comes from where install/setup.sh finds it."""
    shutil.copy(ROOT / "install" / "cpu-overrides.txt", stranger.here / "overrides.txt")
    uv = ROOT / ".venv" / "bin" / "uv"
    command = (
        f"cd {ROOT} && source install/common.sh && cd {stranger.here} && "
        f"{uv} venv --quiet --python {sys.executable} && "
        f'{uv} pip install --quiet ${{torch_source[@]+"${{torch_source[@]}}"}} '
        f"--override overrides.txt 'lightning_rl[cpu] @ file://{wheel}'"
    )
    stranger.does("install", "bash", "-c", f"set -euo pipefail; {command}")


def first_hour(stranger: Stranger, wheel: Path) -> dict[str, float | str]:
    """Take all steps, and return what came of them."""
    install(stranger, wheel)
    stranger.does("doctor", "lightning-rl", "doctor")
    stranger.does("quickstart", "lightning-rl", "quickstart")
    (stranger.here / "my_rewards.py").write_text(REWARD)
    (stranger.here / "mine.yaml").write_text(CONFIGURATION)
    own = ("--config", "recipes/sort_digits/grpo.yaml", "--config", "mine.yaml",
           f"--data.iterations_per_epoch={ITERATIONS}")  # fmt: skip
    stranger.does("check", "lightning-rl", "check", *own)
    fit = ("lightning-rl", "fit", *own, "--ckpt_path", "last")
    stranger.starts_and_kills("own data and reward, killed", ITERATIONS // 2, *fit)
    stranger.does("the same command again, and a push", *fit)
    tokens = stranger.does("load it from the hub", "python", "-c", LOADED)
    (run,) = (stranger.here / "runs" / "mine").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    return {
        "iterations": summary["iterations"],
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "tokens": tokens.splitlines()[-1],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A stranger's first hour, from the wheel alone.")
    parser.add_argument("--wheel", type=Path, help="default: one that is built now")
    parser.add_argument("--keep", action="store_true", help="leave the folder, and say where it is")
    options = parser.parse_args(arguments)
    if options.wheel is None:
        subprocess.run([ROOT / "install" / "build.sh"], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = [options.wheel] if options.wheel else (ROOT / "dist").glob("*.whl")
    hub = WritableHub(TOKEN)
    files = {"train.jsonl": digits(0, 2000), "test.jsonl": digits(1, 64)}
    hub.repository("stranger/digits").commit(files)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    folder = Path(tempfile.mkdtemp(prefix="stranger_"))
    stranger = Stranger(folder, hub)
    begun = time.perf_counter()
    try:
        found = first_hour(stranger, wheel.resolve())
    finally:
        hub.shutdown()
        if options.keep:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder)
    pushed = sorted(hub.files("me/largest-first"))
    total = round(time.perf_counter() - begun, 1)
    print(json.dumps({"seconds": stranger.seconds, "total_s": total, **found, "pushed": pushed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
