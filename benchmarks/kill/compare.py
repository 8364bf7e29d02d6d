"""Compare a killed run with one that was not killed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.kill.runs import GROUPS, ITERATIONS

TIMES = ("time/", "cpu_s", "wall_s", "sync/seconds", "rollout/tokens_per_s")


def run_directory(out: Path) -> Path:
    """Return the run's directory: a resumed run keeps it, if it had a checkpoint when killed."""
    saved = [d for d in (out / "run").iterdir() if list((d / "checkpoints").glob("*.ckpt"))]
    (directory,) = saved
    return directory


def lines_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def final_state(directory: Path, iterations: int = ITERATIONS) -> dict[str, Any]:
    state = torch.load(directory / "checkpoints" / f"iteration_{iterations}.ckpt")
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "RLDataModule")
    own = ("iteration", "parts", "random", "place")  # a place of supervised runs, which have no
    return {name: state[name] for name in kept if name in state} | {  # state of a data module
        name: state["lightning_rl"][name] for name in own if name in state["lightning_rl"]
    }


def differences(ours: Any, theirs: Any, where: str) -> list[str]:
    """Return paths at which two nested values differ; torch.equal decides, but NaN equals NaN."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        alike = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if alike and ours.is_floating_point():
            same = torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            same = torch.equal(ours, theirs)
        return [] if same else [where]
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [d for k in ours for d in differences(ours[k], theirs[k], f"{where}/{k}")]
    if isinstance(ours, list | tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}/{i}")]
    return [] if ours == theirs else [where]


def compare(out: Path, whole: Path, iterations: int = ITERATIONS) -> list[str]:
    """List the differences between a killed run and the uninterrupted one."""
    ours, theirs = run_directory(out), run_directory(whole)
    ended, expected = final_state(ours, iterations), final_state(theirs, iterations)
    found = differences(ended, expected, "state")
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        if not (theirs / file).exists():  # supervised
            continue
        found += differences(lines_of(ours / file), lines_of(theirs / file), file)
    return found


def check_async(out: Path, max_staleness: int = 1) -> list[str]:
    """List the faults of an asynchronous run: prompts lost or trained on twice, stale tokens."""
    directory = run_directory(out)
    groups = {}
    for line in lines_of(directory / "rollouts.jsonl"):
        groups[line["iteration"], line["group_id"]] = line["prompt"]["id"]
    trained = Counter(groups.values())
    found = [f"prompt {prompt} trained on {n} times" for prompt, n in trained.items() if n > 1]
    if sum(trained.values()) != ITERATIONS * GROUPS:
        found.append(f"{sum(trained.values())} groups trained on, not {ITERATIONS * GROUPS}")
    state = torch.load(directory / "checkpoints" / f"iteration_{ITERATIONS}.ckpt")
    source = state["RLDataModule"]["loader"]["ranks"][0]["source"]
    waiting = [group[0]["prompt"]["id"] for group in source["collector"]["groups"]]
    waiting += [prompt["id"] for prompt in source["source"]["again"]]
    prompts = source["source"]["prompts"]
    generator = torch.Generator().manual_seed(prompts["seed"] * 1_000_003 + prompts["epoch"])
    order = torch.randperm(prompts["rows"], generator=generator).tolist()
    drawn = Counter(str(row) for row in order[: prompts["cursor"]])
    if trained + Counter(waiting) != drawn:
        lost = drawn - trained - Counter(waiting)
        found.append(f"of {drawn.total()} prompts drawn, {lost.total()} were lost: {sorted(lost)}")
    rows = lines_of(directory / "metrics.jsonl")
    stale = max(row.get("rollout/staleness_max", 0) for row in rows)
    if stale > max_staleness:
        found.append(f"staleness {stale:g} exceeds {max_staleness}")
    return found
