"""How many frames of an environment does a CPU second train on, here and with others?

    OMP_NUM_THREADS=1 python -m benchmarks.envs [--seeds 5] [--frames 100000] [--save]

PPO on CartPole-v1, eight environments, batches of 1,024 frames, four epochs of four minibatches,
two layers of 64 for each of actor and critic (benchmarks/envs_task.py); `Trainer.fit` of ours
beside torchrl's PPO example, Stable-Baselines3's PPO and CleanRL's ppo.py, each at its best on one
thread (benchmarks/envs_torchrl.py, envs_sb3.py and envs_cleanrl.py say how). The peers live in an
environment of their own, `build/envs-venv`, which the first run makes (set PIP_FIND_LINKS to where
a CPU wheel of torch lies). Runs take turns, each in a process of its own. CPU seconds are of
iterations after the first; returns are of 20 episodes apart with the trained policy, actions drawn.

Another process per seed (benchmarks/envs_bare.py) has, beside each iteration of `Trainer.fit`, one
of a bare loop of the same parts, and the same actions in the environments alone.

The last line is JSON: `frames_ratio`, ours / the fastest peer; `return_ours` and `return_best`, the
mean of the peer with the highest, after the same frames, and `return_spread`, the standard
deviation over seeds of these two; `floor_ratio`, CPU seconds of ours / of the environment alone, at
best 1; `fit_overhead`, `Trainer.fit` / the bare loop, medians over iterations; goal: <= 1.05.

Refuses to start where something else runs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.envs_task import FRAMES
from benchmarks.peers_layouts import reason
from benchmarks.quiet import require_quiet
from benchmarks.results import parser_of, report, write_block

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PEERS = Path("build") / "envs-venv"
PEER_PYTHON = PEERS / "bin" / "python"
SAME = ("torch", "numpy", "gymnasium")
"""Of which the peers get the versions that are here."""
PEER_PACKAGES = ("torchrl==0.14.1", "stable-baselines3==2.9.2", "tensorboard==2.21.0")
CLEANRL = "cleanrl==1.2.0"
"""Without what it asks for: a gym and a torch of its day."""
SIDES: dict[str, tuple[object, str]] = {
    "ours": (sys.executable, "this library"),
    "torchrl": (PEER_PYTHON, "torchrl"),
    "sb3": (PEER_PYTHON, "Stable-Baselines3"),
    "cleanrl": (PEER_PYTHON, "CleanRL"),
}
"""With which Python, and what a table calls it."""
Runs = dict[str, list[dict[str, Any]]]


# ---------------------------------------------------------------- runs


def make_environment() -> None:
    """The peers', unless it is there with these versions."""
    same = [f"{name}=={version(name).partition('+')[0]}" for name in SAME]
    wanted, stamp = "\n".join([*same, *PEER_PACKAGES, CLEANRL]), PEERS / "made"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", PEERS], check=True)
    pip = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *same, *PEER_PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", CLEANRL], check=True)
    stamp.write_text(wanted)


def run(python: object, module: str, iterations: int, seed: int) -> dict[str, Any]:
    """One run of one side, in a process of its own; returns what it measured.

    Raises:
        RuntimeError: if it fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "measured.json"
        words = [python, "-m", f"benchmarks.{module}"]
        words += ["--iterations", iterations, "--seed", seed, "--out", out]
        done = subprocess.run(
            [str(word) for word in words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{module}: {reason(done.stdout)}\n{done.stdout[-3000:]}")
        measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def measure(sides: Sequence[str], iterations: int, seeds: int) -> Runs:
    """All sides in turns; another one begins with every seed."""
    done: Runs = {side: [] for side in sides}
    for seed in range(seeds):
        turn = seed % len(sides)
        for side in [*sides, *sides][turn : turn + len(sides)]:
            last = run(SIDES[side][0], f"envs_{side}", iterations, seed)
            done[side].append(last)
            print(
                f"{side:<8} seed {seed}: {frames_per_cpu_s(last):,.0f} frames per CPU second, "
                f"return {statistics.mean(last['returns']):.0f}",
                flush=True,
            )
    return done


# ---------------------------------------------------------------- figures


def frames_per_cpu_s(measured: Mapping[str, Any]) -> float:
    """Of all iterations but the first, which warms up."""
    counted = measured["cpu_s"][1:]
    return FRAMES * len(counted) / sum(counted)


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One side's; the speed is the median of its runs."""
    returns = [statistics.mean(run["returns"]) for run in runs]
    return {
        "frames_per_cpu_s": statistics.median(map(frames_per_cpu_s, runs)),
        "return_mean": statistics.mean(returns),
        "return_std": statistics.stdev(returns) if len(returns) > 1 else 0.0,
        "returns": returns,
        "setup_cpu_s": statistics.median(run["setup_cpu_s"] for run in runs),
        "version": runs[0]["version"],
    }


def beside_peers(sides: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Ours beside the fastest peer, and beside the one that learned most."""
    ours, peers = sides["ours"], [side for name, side in sides.items() if name != "ours"]
    best = max(peers, key=lambda side: side["return_mean"])
    return {
        "frames_ratio": ours["frames_per_cpu_s"] / max(p["frames_per_cpu_s"] for p in peers),
        "return_ours": ours["return_mean"],
        "return_best": best["return_mean"],
        "return_spread": ((ours["return_std"] ** 2 + best["return_std"] ** 2) / 2) ** 0.5,
    }


def beside_bare(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Ours beside the environment alone and beside the bare loop; medians over iterations."""
    rows = [row for run in runs for row in run["rows"][1:]]
    return {
        "floor_ratio": statistics.median(row["fit"] / row["alone"] for row in rows),
        "fit_overhead": statistics.median(row["fit"] / row["bare"] for row in rows),
        "alone_frames_per_cpu_s": FRAMES / statistics.median(row["alone"] for row in rows),
    }


def table(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"| one thread | frames per CPU second | ours / this | return after {result['frames']:,} "
        f"frames, mean and standard deviation of {result['seeds']} seeds |",
        "|---|---|---|---|",
    ]
    speed = result["sides"]["ours"]["frames_per_cpu_s"]
    for name, side in result["sides"].items():
        title = SIDES[name][1] if name == "ours" else f"{SIDES[name][1]} {side['version']}"
        own = side["frames_per_cpu_s"]
        cells = [title, f"{own:,.0f}", f"{speed / own:.2f}"]
        lines.append(
            f"| {' | '.join(cells)} | {side['return_mean']:.0f} ± {side['return_std']:.0f} |"
        )
    alone = result["alone_frames_per_cpu_s"]
    lines.append(f"| the environment alone | {alone:,.0f} | {speed / alone:.2f} | |")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side")
    parser.add_argument("--frames", type=int, default=100_000, help="of a run, about")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--max-load", type=float, default=0.7, help="of the minute before")
    parser.add_argument(
        "--peers-only-quick", action="store_true", help="a trial: 3 iterations of each peer"
    )
    arguments = parser.parse_args()
    if arguments.peers_only_quick:
        make_environment()
        measure([side for side in arguments.sides if side != "ours"], 3, 1)
        return
    load = require_quiet(arguments.max_load)
    make_environment()
    iterations = arguments.frames // FRAMES
    sides = ["ours", *(side for side in arguments.sides if side != "ours")]
    done = measure(sides, iterations, arguments.seeds)
    bare = [run(sys.executable, "envs_bare", iterations, s) for s in range(arguments.seeds)]
    summaries = {side: summary(runs) for side, runs in done.items()}
    result: dict[str, Any] = beside_peers(summaries) if len(sides) > 1 else {}
    result |= beside_bare(bare)
    result |= {f"frames_{side}": found["frames_per_cpu_s"] for side, found in summaries.items()}
    result |= {"frames": iterations * FRAMES, "seeds": arguments.seeds}
    result |= {"sides": summaries, "load_before": load}
    lines = table(result)
    print("\n".join(lines))
    if arguments.save:
        write_block(PAGE, "envs", lines)
    report("envs", result, arguments.save)


if __name__ == "__main__":
    main()
