"""Define the eight runs, and how a checkout records them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from benchmarks.same_runs import recorder
from benchmarks.same_runs.compare import STAGED_FILES

SORT, GUESS, POINT = "recipes/sort_digits", "recipes/guess_digit", "recipes/pointing"
PROGRAM = "recipes/openai_agent"


@dataclass(frozen=True)
class Checkout:
    """A folder with the code, and how to run it."""

    root: Path
    path: tuple[Path, ...]
    """Folders to import from, before all others."""

    def run(self, *command: str) -> str:
        """Run ``python -m`` in the checkout with its modules; return what it printed.

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
    """Warm-start a model as a recipe's page says."""
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
        """Return the options, configurations among them."""
        pairs = (["--config", o] if o.endswith(".yaml") else [o] for o in self.options)
        return [part for pair in pairs for part in pair]


class Fit(Run):
    """Records ``lightning-rl fit``: its training data, a line per iteration, and the weights."""

    def leave(self, place: Checkout, folder: Path, work: Path) -> None:
        digests = f"{Path(recorder.__file__).stem}.Digests"
        place.run(
            "lightning_rl",
            "fit",
            *self.arguments(),
            "--trainer.logger.save_dir",
            str(work),
            f"--trainer.callbacks+={digests}",
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
    """Records ``lightning-rl staged``: interactions, metrics, and models of its jobs."""

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
            *("--data.evaluation.samples", "1"),
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


def _hash(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()[:16]
