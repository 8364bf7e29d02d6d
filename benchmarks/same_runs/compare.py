"""Find where two recordings of ``same_runs`` differ in what they mean.

Both are read by this checkout, which reads the files of earlier ones. So what is compared is not
how a rollout is written down: :func:`meaning` says what is.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.rollout import Rollout

STAGED_FILES = ("rollouts.jsonl", "tests.jsonl")
TIMES = ("time/", "cpu_s", "wall_s", "/seconds", "per_s")
"""Beginnings and ends of metrics that are of the machine."""

Named = dict[str, Any]


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


def differences(before: Path, after: Path) -> list[str]:
    """List where two recordings of a run differ, in the order in which one would look."""
    first, second = read(before), read(after)
    for name in ("prepared", "weights"):
        first[name], second[name] = _without_renamed(first[name], second[name])
    for name in first["batches"].keys() & second["batches"].keys():
        pairs = zip(first["batches"][name], second["batches"][name], strict=False)
        for place, pair in enumerate(pairs):
            both = _without_renamed(*pair)
            first["batches"][name][place], second["batches"][name][place] = both
    return list(_differences(first, second, after.name))


def read(folder: Path) -> Named:
    """Read all that a run left, for comparison; batches only of a run without rollouts."""
    lines = {p.stem: _json_lines(p) for p in sorted(folder.glob("rank*.jsonl"))}
    ends = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("rank*.json"))}
    rollouts = dict(sorted(_rollouts(folder)))
    batches = {} if rollouts else {k: [row["batch"] for row in rows] for k, rows in lines.items()}
    metrics = {k: [_lasting(row["metrics"]) for row in rows] for k, rows in lines.items()}
    weights = {f"{k}/{n}": d for k, end in ends.items() for n, d in end["weights"].items()}
    staged = folder / "metrics.jsonl"
    if staged.exists():
        metrics["staged"] = [_lasting(row) for row in _json_lines(staged)]
    return {
        "prepared": json.loads((folder / "prepared.json").read_text()),
        "rollouts": rollouts,
        "batches": batches,
        "metrics": metrics,
        "weights": weights,
    }


def meaning(rollout: Rollout) -> Named:
    """Return what a rollout says, however kept: tokens and whose they are, rewards, and seeds.

    Calls that wrote no tokens of the rollout's are left out: where there are tokens of none, they
    are notes.
    """
    return {
        "prompt": rollout.prompt.id,
        "status": rollout.status.value,
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "role_rewards": rollout.role_rewards,
        "reward_parts": rollout.reward_parts,
        "environment_reward": rollout.environment_reward,
        "seeds": [rollout.seed, rollout.own_seed],
        "sampling": asdict(rollout.sampling),
        "completion": rollout.completion,
        "rows": [
            {
                "role": row.role,
                "prompt_ids": row.prompt_ids,
                "token_ids": row.token_ids,
                "loss_mask": row.loss_mask,
                "logprobs": row.logprobs,
                "versions": row.versions,
            }
            for row in rollout.rows
        ],
        "calls": [
            [call.row, call.start, call.stop, call.seed, call.reward]
            for call in rollout.model_calls()
            if call.stop > call.start
        ],
    }


def _rollouts(folder: Path) -> Iterator[tuple[str, Named]]:
    """Yield the rollouts that a run trained on or a staged run sampled, by iteration and id."""
    trained = sorted((folder / "rerun").glob("*.parquet"))
    staged = [folder / name for name in STAGED_FILES if (folder / name).exists()]
    for file in (*trained, *staged):
        kind = file.stem if file in staged else "trained"
        for recorded in open_rollouts(file).read():
            rollout = recorded.rollout
            yield f"{kind}/{recorded.iteration:06d}/{rollout.id}", meaning(rollout)


def _json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _lasting(metrics: Named) -> Named:
    """Drop what differs from run to run."""
    kept = metrics.items()
    return {name: v for name, v in kept if not (name.startswith(TIMES) or name.endswith(TIMES))}


def _without_renamed(before: Named, after: Named) -> tuple[Named, Named]:
    """Leave out of both what has one name in one, and another in the other, value for value."""
    gone = {name: value for name, value in before.items() if name not in after}
    new = {name: value for name, value in after.items() if name not in before}
    for name, value in gone.items():
        match = next((other for other, has in new.items() if has == value), None)
        if match is not None:
            del new[match]
            before = {key: held for key, held in before.items() if key != name}
            after = {key: held for key, held in after.items() if key != match}
    return before, after


def _differences(before: Any, after: Any, place: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from _differences(before.get(key), after.get(key), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            yield from _differences(a, b, f"{place}[{number}]")
    elif before != after and (before == before or after == after):  # NaN is itself here
        yield f"{place}: {_short(before)} before, {_short(after)} after"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
