"""Kill staged runs at random moments, let them go on, and compare them with runs not killed.

    python -m benchmarks.staged_kill --points 10

The runs are commands that a user gives, ``lightning-rl staged --config FILE``: on the pointing task
expert iteration, two iterations of it, and then MALT from what it made, with local jobs. They take
turns; each is killed once, at a moment drawn from the time that it takes, and the same command is
given again. Killed is the trainer alone, its process group, or all there is, running jobs too, as
when a machine fails.

"equal" means: all that a run leaves is, but for its random name and for times: state, interactions
(in the order of their names: some are played at the same time), metrics, and the bytes of every
model that a job made. "jobs_repeated" counts jobs that one run has and the other has not, and those
that were started twice though nobody killed them.

The last line is JSON.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.kill.runs import folder_of
from lightning_rl.data.rollouts.files import as_record, open_rollouts
from recipes.pointing.prepare import prepare

WHO = ("trainer", "group", "machine")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "expert_iteration": {
        "algorithm": {"class_path": "ExpertIteration", "init_args": {
            "samples": 2, "truth_share": 0.3}},
        "iterations": 2,
    },
    "malt": {"algorithm": {"class_path": "MALT", "init_args": {"width": 2}}, "iterations": 1},
}  # fmt: skip


def configuration(name: str, data: Path, model: Path, engine: str) -> dict[str, Any]:
    """Return a run as a YAML file would say it; its directory is below the working directory."""
    # One request after another: others in a batch change the last bits of logits.
    options = {"TransformersEngine": {"max_batch_size": 1}, "VLLMLocal": {"max_model_len": 64}}
    chat = {
        "engine": {"class_path": engine, "init_args": options[engine]},
        "sampling": {"max_tokens": 2},
    }
    fit = {"model": {"init_args": {"optimizer": {"class_path": "torch.optim.AdamW",
                                                 "init_args": {"lr": 3e-4}}}}}  # fmt: skip
    rows = {
        kind: {"class_path": "JSONLPrompts", "init_args": {"path": str(data / f"{file}.jsonl")}}
        for kind, file in (("train", "train"), ("test", "heldout"))
    }
    group = {
        "agents": ["prover", "verifier"],
        "model": str(model),
        "chat": {"class_path": "EngineChat", "init_args": chat},
        "jobs": {"class_path": "LocalJobs", "init_args": {"supervised": fit, "preference": fit}},
    }
    return {
        "run_dir": "run",
        "protocol": "Adp",
        "scenario": "recipes.pointing.scenario.Pointing",
        **rows,
        "groups": {"all": group},
        "rows_per_iteration": 40,
        "test_limit": 16,
        "max_concurrency": 1 if engine == "VLLMLocal" else 8,
        "poll_s": 0.1,
        "seed": 0,
    } | ALGORITHMS[name]


class Run:
    """A staged run in a directory of its own, whose command is given as often as need be."""

    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        out.mkdir(parents=True)
        self.out, self.directory = out, out / "run"
        (out / "config.yaml").write_text(json.dumps(config))  # JSON is YAML

    def start(self) -> subprocess.Popen[bytes]:
        """Give the command."""
        root = str(Path(__file__).parents[1])
        command = [sys.executable, "-m", "lightning_rl", "staged", "--config", "config.yaml"]
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with (self.out / "output.txt").open("a") as output:
            return subprocess.Popen(
                command, cwd=self.out, stdout=output, stderr=output, start_new_session=True,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip

    def finish(self) -> float:
        """Let it come to its end; the seconds that took, from when it has a state."""
        process = self.start()
        begin = self._wait_for_state(process)
        if process.wait() != 0:
            raise SystemExit(f"the run ended with {process.returncode}: {self.out}/output.txt")
        return time.monotonic() - begin

    def kill(self, who: str, after_s: float) -> bool:
        """Start it, and kill it so many seconds after it has a state; False if it was faster."""
        process = self.start()
        self._wait_for_state(process)
        try:
            process.wait(after_s)
            return False
        except subprocess.TimeoutExpired:
            pass
        if who == "trainer":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for file in self.directory.glob("jobs/*/pid") if who == "machine" else ():
            if not file.with_name("result.json").exists():
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(int(file.read_text()), signal.SIGKILL)
        return True

    def _wait_for_state(self, process: subprocess.Popen[bytes]) -> float:
        while not (self.directory / "state.json").exists() and process.poll() is None:
            time.sleep(0.01)
        return time.monotonic()

    def jobs(self) -> dict[str, int]:
        """Starts by the job's name."""
        found = self.directory.glob("jobs/*/starts")
        return {f.parent.name.partition("-")[2]: f.stat().st_size for f in found}


def killed_run(
    out: Path, config: dict[str, Any], who: str, seconds: float, rng: random.Random
) -> Run:
    """Kill a run at a random moment; another moment, if the run was faster."""
    while True:
        run = Run(out, config)
        if run.kill(who, rng.random() * seconds):
            return run
        shutil.rmtree(out)


def results(directory: Path) -> dict[str, Any]:
    """Read all that a run leaves, but for its name and times."""
    state = json.loads((directory / "state.json").read_text())
    name = state.pop("run")
    for group in state["groups"].values():
        for job in group["jobs"]:
            del job["created"]
    found: dict[str, Any] = {"state": state}
    for file in ("rollouts.jsonl", "tests.jsonl"):
        records = [as_record(read.rollout) for read in open_rollouts(directory / file).read()]
        found[file] = sorted(records, key=lambda record: str(record["id"]))
    for file in ("metrics.jsonl", "summary.json"):
        found[file] = (directory / file).read_text()
    for weights in sorted(directory.glob("jobs/*/model/*.safetensors")):
        found[str(weights)] = hashlib.sha256(weights.read_bytes()).hexdigest()
    plain: dict[str, Any] = json.loads(
        json.dumps(found).replace(name, "NAME").replace(str(directory), "RUN")
    )
    return plain


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return the first thing that differs; empty if nothing does."""
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return next((name for name in names if ours.get(name) != theirs.get(name)), "")


def warm_start(out: Path) -> Path:
    """Make a model that has seen how turns are written."""
    options = {
        "model.model": out / "data" / "model", "data.train.path": out / "data" / "sft.jsonl",
        "trainer.max_steps": 100, "trainer.logger": "false", "trainer.default_root_dir": out,
        "trainer.callbacks": "[HFExport]", "trainer.callbacks.directory": out / "hf",
    }  # fmt: skip
    command = [sys.executable, "-m", "lightning_rl", "fit", "--config", "recipes/pointing/sft.yaml"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (out / "hf").is_dir():
        raise SystemExit(f"the warm start ended with {done.returncode}: {done.stderr}")
    return out / "hf"


def measure(options: argparse.Namespace, out: Path) -> int:
    """Run everything, print the table; 0 if all points are equal."""
    prepare(out / "data")
    model, whole, seconds = warm_start(out), {}, {}
    for name in ALGORITHMS:
        whole[name] = Run(out / name, configuration(name, out / "data", model, options.engine))
        seconds[name] = whole[name].finish()
        print(f"{name}: {seconds[name]:.1f} s, jobs {whole[name].jobs()}", flush=True)
        model = (out / name / "run" / "models" / "all").resolve()
    rng = random.Random(options.seed)
    equal = repeated = 0
    for number in range(options.points):
        name = list(ALGORITHMS)[number % len(ALGORITHMS)]
        who = WHO[number % len(WHO)]
        config = json.loads((out / name / "config.yaml").read_text())
        run = killed_run(out / f"point_{number}", config, who, seconds[name], rng)
        stage = json.loads((run.directory / "state.json").read_text())
        run.finish()
        jobs, expected = run.jobs(), whole[name].jobs()
        again = sum(starts > 1 for starts in jobs.values()) if who != "machine" else 0
        repeated += len(jobs.keys() ^ expected.keys()) + again
        differs = difference(results(run.directory), results(whole[name].directory))
        equal += not differs
        where = f"{stage['stage']} of iteration {stage['iteration']}"
        print(f"{number}: {name}, {who} killed in {where}: {differs or 'equal'}", flush=True)
    print(json.dumps({"points": options.points, "equal": equal, "jobs_repeated": repeated}))
    return int(equal < options.points or repeated > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill staged runs at random moments and compare.")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine", default="TransformersEngine", choices=["VLLMLocal", "TransformersEngine"]
    )
    parser.add_argument("--keep", type=Path, help="a folder for the runs (default: deleted)")
    options = parser.parse_args()
    with folder_of(options.keep, "staged_kill_") as out:
        return measure(options, out)


if __name__ == "__main__":
    sys.exit(main())
