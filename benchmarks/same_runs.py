"""Eight runs of which everything is written down: rollouts, metrics and weights, to the last bit.

    python -m benchmarks.same_runs --out before --at 3c66317     (a commit)
    python -m benchmarks.same_runs --out before --checkout FOLDER
    python -m benchmarks.same_runs --out after                   (this checkout)
    python -m benchmarks.same_runs --compare before after

Record before and after a change that must change nothing, and compare. Each run is a command in
the checkout it is of, so modules may have moved: configurations name classes by their bare names.
Compared are rollouts (prompts, tokens, logprobs, masks, rewards, seeds, however the files keep
them), metrics but times, and the bits of all weights, by value where they have other names. The
first comparison is of the models that the runs began with, which each checkout makes.

The runs, with real vLLM and seed 0: the quickstart (28 iterations); one step ahead of the trainer;
two processes; several turns; SAC on Pendulum; a protocol between two policies; programs that are
agents; and training by fine-tuning jobs, in stages. The last line is JSON; the exit status is 1 if
there are differences.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from benchmarks import same_runs_recorder
from benchmarks.house import ROOT, checkout
from benchmarks.same_runs_compare import STAGED_FILES, differences

SORT, GUESS, POINT = "recipes/sort_digits", "recipes/guess_digit", "recipes/pointing"
PROGRAM = "recipes/openai_agent"


@dataclass(frozen=True)
class Checkout:
    """A folder with the code, and how to run it."""

    root: Path
    path: tuple[Path, ...]
    """Folders to import from, before all others."""

    def run(self, *command: str) -> str:
        """``python -m``, in the checkout and with its modules; what it printed.

        Raises:
            RuntimeError: if it fails; with the end of what it said.
        """
        folders = os.pathsep.join(map(str, (self.root, *self.path)))
        # One thread: sums are in another order with another number of them.
        fixed = {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""}
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.root,
            env=os.environ | fixed,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            told = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise RuntimeError(f"{' '.join(command)} in {self.root} failed:\n{told}")
        return done.stdout


@dataclass(frozen=True)
class Prepared:
    """A warm-started model, and the commands that make it."""

    model: str
    commands: tuple[tuple[str, ...], ...]

    def make(self, place: Checkout) -> dict[str, str]:
        """Make it where it is not there yet; its name and a hash of its weights."""
        folder = place.root / self.model
        if not (folder / "config.json").exists():
            for command in self.commands:
                place.run(*command)
        weights = sorted(folder.glob("*.safetensors"))
        return {f"{self.model}/{file.name}": _hash(file) for file in weights}


def warm_started(recipe: str, *options: str) -> Prepared:
    """As a recipe's page says to make it."""
    name = Path(recipe).name
    prepare = (f"recipes.{name}.prepare", "--out", f"runs/{name}")
    fit = ("lightning_rl", "fit", "--config", f"{recipe}/sft.yaml", *options)
    return Prepared(f"runs/{name}/sft/hf", (prepare, fit))


@dataclass(frozen=True)
class Run(ABC):
    """A command, and what it begins with."""

    options: tuple[str, ...]
    begins_with: Prepared | None = None

    def record(self, place: Checkout, folder: Path) -> None:
        """Run it; the folder is there, and empty."""
        made = {} if self.begins_with is None else self.begins_with.make(place)
        (folder / "prepared.json").write_text(json.dumps(made, indent=1))
        with tempfile.TemporaryDirectory() as work:
            self.leave(place, folder, Path(work))

    @abstractmethod
    def leave(self, place: Checkout, folder: Path, work: Path) -> None:
        """Run it, with its own files in ``work``, and leave in the folder what is compared."""

    def arguments(self) -> list[str]:
        """The options, configurations among them."""
        pairs = (["--config", o] if o.endswith(".yaml") else [o] for o in self.options)
        return [part for pair in pairs for part in pair]


class Fit(Run):
    """``lightning-rl fit``: what it was trained on, a line per iteration, and the weights."""

    def leave(self, place: Checkout, folder: Path, work: Path) -> None:
        recorder = f"{same_runs_recorder.Digests.__module__.rpartition('.')[2]}.Digests"
        place.run(
            "lightning_rl",
            "fit",
            *self.arguments(),
            "--trainer.logger.save_dir",
            str(work),
            f"--trainer.callbacks+={recorder}",
            "--trainer.callbacks.folder",
            str(folder),
        )
        for rerun in work.rglob("rerun"):  # none where there are no rollouts
            shutil.copytree(rerun, folder / "rerun")
        for end in folder.glob("rank*.json"):
            library = Path(json.loads(end.read_text())["library"])
            if not library.is_relative_to(place.root):
                raise RuntimeError(f"{library} was run, and not what is in {place.root}")


class Staged(Run):
    """``lightning-rl staged``: interactions, metrics, and every model that its jobs made."""

    def leave(self, place: Checkout, folder: Path, work: Path) -> None:
        place.run("lightning_rl", "staged", *self.arguments(), "--run_dir", str(work))
        for name in (*STAGED_FILES, "metrics.jsonl"):
            shutil.copy(work / name, folder)
        run = json.loads((work / "state.json").read_text())["run"]  # drawn anew by each
        models = {
            str(file.relative_to(work)).replace(run, "RUN"): _hash(file)
            for file in sorted(work.rglob("*.safetensors"))
        }
        (folder / "rank0.json").write_text(json.dumps({"weights": models}, indent=1))


SIX = ("--data.iterations_per_epoch", "6")
SORTER, POINTER = warm_started(SORT), warm_started(POINT)
RUNS: dict[str, Run] = {
    "quickstart": Fit((f"{SORT}/grpo.yaml",), SORTER),
    "one_step_ahead": Fit(
        (
            f"{SORT}/grpo.yaml",
            f"{SORT}/variants/async.yaml",
            *SIX,
            "--data.collector",
            "OneStepOffCollector",
        ),
        SORTER,
    ),
    "two_processes": Fit((f"{SORT}/grpo.yaml", f"{SORT}/variants/ddp.yaml", *SIX), SORTER),
    "several_turns": Fit((f"{GUESS}/grpo.yaml", *SIX), warm_started(GUESS)),
    # 32 iterations of random actions, then updates.
    "sac": Fit(("recipes/pendulum/sac.yaml", "--data.iterations_per_epoch", "60")),
    "protocol": Fit((f"{POINT}/adp.yaml", *SIX), POINTER),
    # One program at a time: of several, which asks first is the machine's to say, and requests in
    # another order make other batches, whose sums are rounded otherwise.
    "program": Fit(
        (
            f"{PROGRAM}/grpo.yaml",
            *("--data.iterations_per_epoch", "3"),
            *("--data.groups_per_iteration", "4"),
            *("--data.eval_samples", "1"),
            *("--data.agent.max_concurrency", "1"),
        ),
        warm_started(PROGRAM),
    ),
    "staged": Staged(
        (
            f"{POINT}/expert_iteration.yaml",
            *("--iterations", "2"),
            *("--rows_per_iteration", "200"),
        ),
        POINTER,
    ),
}


def record(place: Checkout, out: Path, names: Sequence[str]) -> None:
    """Run these in a checkout, each into a folder of its name, in place of what was there."""
    for name in names:
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        RUNS[name].record(place, folder)
        print(f"{name}: recorded in {folder}", flush=True)


def compare(before: Path, after: Path, names: Sequence[str]) -> int:
    """Print the first differences of each run, and count all; a run that is missing is one."""
    count = 0
    for name in names:
        missing = [str(p / name) for p in (before, after) if not (p / name).is_dir()]
        found = [f"{name}: {place} is not there" for place in missing]
        found = found or differences(before / name, after / name)
        print(f"{name}: {len(found) or 'no'} differences", *found[:10], sep="\n  ")
        count += len(found)
    return count


def _hash(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="record into this folder")
    task.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--at", metavar="COMMIT", help="record a commit's runs")
    code.add_argument(
        "--checkout", type=Path, default=ROOT, help="record a folder's; default: this"
    )
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS))
    args = parser.parse_args()
    if args.compare is not None:
        before, after = args.compare
        count = compare(before, after, args.only)
        print(json.dumps({"runs": len(args.only), "differences": count}))
        return int(bool(count))
    with ExitStack() as folders:
        root = args.checkout.resolve()
        if args.at is not None:
            root = checkout(args.at, folders.enter_context(tempfile.TemporaryDirectory()))
        alone = Path(folders.enter_context(tempfile.TemporaryDirectory()))
        shutil.copy(same_runs_recorder.__file__, alone)  # the checkout has another, or none
        record(Checkout(root, (alone,)), args.out.resolve(), args.only)
    print(json.dumps({"runs": len(args.only)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
