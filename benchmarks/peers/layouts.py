"""Lay out the runs of `benchmarks/peers` and `benchmarks/wall` on the machine, and run them."""

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.tasks import BUILD, Task

PEER_PYTHON = BUILD / "peers-venv" / "bin" / "python"
PEER_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "trl==1.16.0")
GENERATIONS: dict[str, tuple[object, str]] = {
    "padded": (PEER_PYTHON, "benchmarks.peers.trl"),
    "continuous": (PEER_PYTHON, "benchmarks.peers.trl"),
    "vllm": (sys.executable, "benchmarks.peers.trl_vllm"),
}
"""The Python and the engine with which TRL generates."""
COMPLETIONS = 256
START_S = 30
"""The longest time that vLLM may take to start."""
STOP_S = 40
"""The longest time that torchrun may take to end its processes; it kills them after 30."""
Side = Callable[..., dict[str, Any]]
"""``run_ours`` or ``run_trl``."""


@dataclass(frozen=True)
class Layout:
    """A layout of processes, and OpenMP threads of each.

    ``streamed``: groups that the engine, in a thread of its own, has in flight while the trainer
    works on those that are complete; 0: the trainer waits for the batch. ``generation``: ours is
    ``vllm`` or ``transformers``, TRL's one of ``GENERATIONS``.
    """

    threads: int = 1
    processes: int = 1
    streamed: int = 0
    generation: str = "vllm"


def make_environment() -> None:
    """Make TRL's environment, if it is not there yet."""
    if PEER_PYTHON.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", PEER_PYTHON.parents[1]], check=True)
    pip = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
    subprocess.run(pip, check=True)


def run_ours(
    task: Task, seed: int, layout: Layout, patience: float | None = None
) -> dict[str, Any]:
    command: list[object] = [sys.executable, "-m", "benchmarks.peers.ours"]
    command += ["--processes", layout.processes, "--streamed", layout.streamed]
    return run(command, task, seed, layout, patience)


def run_trl(task: Task, seed: int, layout: Layout, patience: float | None = None) -> dict[str, Any]:
    python, module = GENERATIONS[layout.generation]
    command = [python, "-m", module]
    if layout.processes > 1:
        # What accelerate's own launcher starts by, save on CPUs: there it starts one process,
        # however many it is asked for, unless MPI is installed.
        launcher = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command = [python, "-m", *launcher, "--nproc-per-node", layout.processes, "-m", module]
    return run(command, task, seed, layout, patience)


def run(
    command: Sequence[object],
    task: Task,
    seed: int,
    layout: Layout,
    patience: float | None = None,
) -> dict[str, Any]:
    """Run once; return what its processes measured.

    Raises:
        RuntimeError: if it fails, or does not train on all completions of an iteration.
        subprocess.TimeoutExpired: if it is not over after ``patience`` seconds.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": str(layout.threads),
        "TRL_PACKAGES": ":".join(
            map(str, PEER_PYTHON.parents[1].glob("lib/python3*/site-packages"))
        ),
    }
    options = {
        "model": task.model,
        "prompts": task.prompts,
        "iterations": task.iterations,
        "max-tokens": task.max_tokens,
        "max-model-len": task.max_model_len,
        "micro-batch": task.micro_batch,
        "goal": task.goal,
        "generation": layout.generation,
        "seed": seed,
        "threads": layout.threads,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(word) for word in (*command, *words, "--out", directory)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(patience)
        except BaseException:
            end(process)
            raise
        files = sorted(Path(directory).glob("measured_*.json"))
        # TRL's processes abort at times as they end, when all is measured.
        if process.returncode and len(files) < layout.processes:
            log.seek(0)
            text = log.read()
            raise RuntimeError(f"failed: {reason(text)}\n{text[-3000:]}")
        ranks = [json.loads(file.read_text()) for file in files]
    if len(ranks) != layout.processes or set(ranks[0]["completions"]) != {COMPLETIONS}:
        raise RuntimeError(
            f"{len(ranks)} processes trained on {ranks[0]['completions']} completions per "
            f"iteration, not {layout.processes} on {COMPLETIONS}"
        )
    return together(ranks)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process with all processes that it started."""
    os.killpg(process.pid, signal.SIGTERM)  # torchrun's are of other groups: it has to end them
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason(log: str) -> str:
    """Return the error of the first traceback; torchrun writes its own below its processes'."""
    traceback = log.partition("Traceback (most recent call last)")[2]
    found = re.search(
        r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)", traceback, re.MULTILINE
    )
    return found[1] if found else "without a traceback"


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank 0's figures, with the CPU seconds and the memory of all."""
    cpu_s = [sum(each) for each in zip(*(rank["cpu_s"] for rank in ranks), strict=True)]
    sums = {key: sum(rank[key] for rank in ranks) for key in ("setup_cpu_s", "peak_rss_bytes")}
    return ranks[0] | {"cpu_s": cpu_s} | sums


def explore(
    task: Task, layouts: Mapping[str, Layout], side: Side, key: str
) -> dict[str, float | str]:
    """Return seconds per iteration (``cpu_s`` or ``wall_s``) of layouts, or why one has none.

    One that takes twice as long as the fastest before it is given up.
    """
    tried: dict[str, float | str] = {}
    fastest = math.inf
    for name, layout in layouts.items():
        patience = None if fastest == math.inf else 2 * fastest + START_S
        begin = time.perf_counter()
        try:
            tried[name] = statistics.median(counted([side(task, 0, layout, patience)], key))
            fastest = min(fastest, time.perf_counter() - begin)
        except subprocess.TimeoutExpired:
            tried[name] = f"given up after {patience:.0f} s"
        except RuntimeError as error:
            tried[name] = str(error).splitlines()[0]
        result = tried[name]
        told = result if isinstance(result, str) else f"{result:.3f}"
        print(f"{task.name:<11}{key.replace('_', ' ')}/iteration, {name}: {told}", flush=True)
    return tried


def fastest_of(tried: Mapping[str, float | str]) -> list[str]:
    """Return the names of those that ran, the fastest first.

    Raises:
        RuntimeError: if none did.
    """
    seconds = {name: result for name, result in tried.items() if isinstance(result, float)}
    if not seconds:
        raise RuntimeError(f"no layout ran: {tried}")
    return sorted(seconds, key=lambda name: seconds[name])


def counted(runs: list[dict[str, Any]], key: str) -> list[float]:
    """Return every iteration of a run but the first, which warms up."""
    return [value for run in runs for value in run[key][1:]]


def summary(runs: list[dict[str, Any]], task: Task) -> dict[str, float]:
    """Summarise one side's runs of one task as medians. ``reached`` of them met the goal."""
    rewards = [sum(run["rewards"][-3:]) / 3 for run in runs]
    return {
        "cpu_s_per_iteration": statistics.median(counted(runs, "cpu_s")),
        "wall_s_per_iteration": statistics.median(counted(runs, "wall_s")),
        "tokens_per_iteration": statistics.median(n for run in runs for n in run["tokens"]),
        "tokens_per_wall_s": sum(counted(runs, "tokens")) / sum(counted(runs, "wall_s")),
        "iterations": statistics.median(len(run["cpu_s"]) for run in runs),
        "cpu_s": statistics.median(sum(run["cpu_s"]) for run in runs),
        "wall_s": statistics.median(sum(run["wall_s"]) for run in runs),
        "reached": sum(reward >= task.goal for reward in rewards),
        "setup_cpu_s": statistics.median(run["setup_cpu_s"] for run in runs),
        "peak_rss_gib": max(run["peak_rss_bytes"] for run in runs) / 2**30,
    }
