"""Run each side in processes and an environment of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.envs.figures import Runs, summary
from benchmarks.envs.task import TASKS
from benchmarks.peers.layouts import reason

PEERS = Path("build") / "envs-venv"
PEER_PYTHON = PEERS / "bin" / "python"
SAME = ("torch", "numpy", "gymnasium")
"""The packages that the peers get in the versions installed here."""
PEER_PACKAGES = ("torchrl==0.14.1", "stable-baselines3==2.9.2", "tensorboard==2.21.0")
CLEANRL = "cleanrl==1.2.0"
"""The package is installed without its requirements: a gym and a torch of its day."""
SIDES: dict[str, object] = {
    "ours": sys.executable,
    "same": sys.executable,
    "torchrl": PEER_PYTHON,
    "sb3": PEER_PYTHON,
    "cleanrl": PEER_PYTHON,
}
"""The Python of each side."""


def make_environment() -> None:
    """Make the peers' environment, unless it is there with these versions."""
    same = [f"{name}=={version(name).partition('+')[0]}" for name in SAME]
    wanted, stamp = "\n".join([*same, *PEER_PACKAGES, CLEANRL]), PEERS / "made"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", PEERS], check=True)
    pip = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *same, *PEER_PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", CLEANRL], check=True)
    stamp.write_text(wanted)


def run(
    side: str, task: str, seed: int, most: int | None = None, runs: Path | None = None
) -> dict[str, Any]:
    """Run one side once, in a process of its own; return what it measured.

    ``most``: iterations, if not the task's; ``runs``: where runs lie that were made before.

    Raises:
        RuntimeError: if it fails.
    """
    kept = None if runs is None else runs / f"{task}-{side}-{seed}.json"
    if kept is not None and kept.exists():
        made: dict[str, Any] = json.loads(kept.read_text())
        return made
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "measured.json"
        words = [SIDES.get(side, sys.executable), "-m", f"benchmarks.envs.{side}"]
        words += ["--task", task, "--seed", seed, "--out", out]
        words += ["--most", most] if most is not None else []
        done = subprocess.run(
            [str(word) for word in words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"envs.{side}: {reason(done.stdout)}\n{done.stdout[-3000:]}")
        measured: dict[str, Any] = json.loads(out.read_text())
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(measured))
    return measured


def measure(task: str, sides: Sequence[str], seeds: int, runs: Path | None) -> Runs:
    """Run all sides in turns; another one begins with every seed."""
    done: Runs = {side: [] for side in sides}
    for seed in range(seeds):
        turn = seed % len(sides)
        for side in [*sides, *sides][turn : turn + len(sides)]:
            done[side].append(run(side, task, seed, runs=runs))
            last = summary(TASKS[task], done[side][-1:])
            print(
                f"{task:<9} {side:<8} seed {seed}: {last['frames_per_cpu_s']:,.0f} frames per CPU "
                f"second, goal after {last['frames_to_goal']:,.0f}"
                f"{'' if last['reached'] else ' not reached'}, return {last['return_mean']:.0f}",
                flush=True,
            )
    return done
