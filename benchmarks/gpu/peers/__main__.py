"""How fast is an iteration of GRPO on a GPU, beside TRL 1.16's, and where do its seconds go?

    python -m benchmarks.gpu.peers                        at most six minutes, on a bare machine
    python -m benchmarks.gpu.peers --seconds 570 --only full
    python -m benchmarks.gpu.peers --device cpu           ours alone, at tiny sizes

A model of Qwen3-0.6B's shape with random weights (`full`, all of them trained), and one of
Qwen3-1.7B's (`lora`); 32 prompts x 8 completions that end by lot (256 tokens in the mean, 1,024 at
most), then 256 tokens each; bfloat16 beside float32 weights; vLLM in the trainer's process with the
same share of the card. Sides come in turns, each in a process of its own: `ours`; `trl`, TRL's
defaults; `trl-best`, its best: micro-batches of 32, Liger's kernels, an engine that sleeps while it
trains, no gradient checkpointing, no correction that costs a pass (`--best` says otherwise).

A line of JSON per iteration, as soon as it is over, then a record per side; what no time is left
for is skipped by its name. The last line is JSON: `ratio_full` and `ratio_lora` are seconds per
written token, TRL's defaults / ours, in the median of the iterations by lot but the first, with
`_best` of TRL's best, `_equal` of equal lengths; `update_tokens_s` are tokens that went through
passes with gradients, a shared prompt once, per second of an update, `update_written_s` tokens that
were written; `mfu` is of the card's 989 TFLOP/s in bfloat16 (H100 and H200), by
`benchmarks.gpu.peers.watch.model_flops`; `peak_gib` is torch's, vLLM's part included; `start_s`
goes from the start of the process, its imports included, to the end of the first iteration, and
`stages` says where they went. null: not reached.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.__main__ import sees_cuda
from benchmarks.gpu.bench import rounded
from benchmarks.gpu.peers.task import EQUAL, LOT, Task, following, lines_of
from benchmarks.gpu.runner import Process, Record
from benchmarks.gpu.table import Check

SECONDS = 350.0
LEAST_S = {"cuda": 45.0, "cpu": 5.0}
"""The least time in which a side is begun: with less it would not get to an iteration."""
PEAK_FLOPS = 989e12
BEST = {
    "per_device_train_batch_size": 32,
    "use_liger_kernel": True,
    "vllm_enable_sleep_mode": True,
    "gradient_checkpointing": False,
    "vllm_importance_sampling_correction": False,
}
TASKS = {
    "full": Task("qwen3-0.6b"),
    "lora": Task("qwen3-1.7b", lora=True, equal_iterations=0),
}


@dataclass(frozen=True)
class Side:
    """One process; ``packages`` are those that it needs."""

    name: str
    target: str
    task: Task
    packages: tuple[str, ...] = ()

    @property
    def check(self) -> Check:
        """Run this side's check; its limit is cut to the time that is left."""
        return Check(self.name.replace("/", "-"), self.target, SECONDS, self._options)

    @property
    def _options(self) -> dict[str, Any]:
        named = {"side": self.name} if self.target.endswith(":run") else {}
        return named | asdict(self.task)

    @property
    def lacks(self) -> str | None:
        """Return a package that is not installed."""
        return next((name for name in self.packages if find_spec(name) is None), None)


def sides_of(tasks: Mapping[str, Task], best: Mapping[str, Any]) -> list[Side]:
    """List each task's model and who trains it, in order."""
    found = []
    for case, task in tasks.items():
        package = "benchmarks.gpu.peers"
        found.append(Side(f"{case}/model", f"{package}.model:make", task))
        found.append(Side(f"{case}/ours", f"{package}.ours:run", task))
        for name, settings in (("trl", {}), ("trl-best", best)):
            told = replace(task, trl=settings)
            needed = ("trl", "vllm", "peft", *["liger_kernel"] * bool(settings))
            found.append(Side(f"{case}/{name}", f"{package}.trl_side:run", told, needed))
    return found


def run_all(
    sides: Sequence[Side],
    device: str,
    scratch: Path,
    seconds: float,
    tell: Callable[[Record], None],
) -> tuple[list[Record], list[Record]]:
    """Run sides until the time is over; returns their lines and their records.

    While one works, the next one's process already imports what it needs.
    """
    began = time.perf_counter()
    lines: list[Record] = []
    records: list[Record] = []

    def hear(line: Record) -> None:
        lines.append(line)
        tell(line)

    waiting = [side for side in sides if side.lacks is None]
    ready: Process | None = None
    try:
        for side in sides:
            left = seconds - (time.perf_counter() - began)
            if side.lacks is not None:
                record = {"skipped": side.name, "why": f"{side.lacks} is not installed"}
            elif left < LEAST_S[device]:
                record = {"skipped": side.name, "why": f"{left:.0f} s are left"}
            else:
                process = ready or Process(side.check, device, scratch)
                following_side = waiting[waiting.index(side) + 1 :]
                ready = (
                    Process(following_side[0].check, device, scratch) if following_side else None
                )
                with following(lines_of(scratch, side.name), hear):
                    record = {"side": side.name} | process.run(left)
                del record["check"]
            records.append(rounded(record))
            tell(records[-1])
    finally:
        if ready is not None:
            ready.end()
    return lines, records


def summary_of(lines: Sequence[Record], records: Sequence[Record], device: str) -> Record:
    """Return the last line; a processor's share of the card's operations would say nothing."""
    first = {name: _of(lines, "full/ours", name)[:1] for name in ("start_s", "stages", "vllm")}
    updates = _iterations(lines, "full/ours", LOT)
    rates = {
        "update_tokens_s": [u["passed"] / u["update_s"] for u in updates],
        "update_written_s": [u["written"] / u["update_s"] for u in updates],
        "mfu": [u["flops"] / u["update_s"] / PEAK_FLOPS for u in updates if device == "cuda"],
    }
    peaks = [peak for peak in _of(lines, "full/ours", "peak_gib") if peak is not None]
    return rounded(
        {
            f"ratio_{case}{what}": _ratio(lines, case, peer, phase)
            for case in TASKS
            for what, peer, phase in (
                ("", "trl", LOT),
                ("_best", "trl-best", LOT),
                ("_equal", "trl", EQUAL),
                ("_equal_best", "trl-best", EQUAL),
            )
        }
        | {name: median(values) if values else None for name, values in rates.items()}
        | {"peak_gib": max(peaks, default=None)}
        | {name: values[0] if values else None for name, values in first.items()}
        | {"skipped": {r["skipped"]: r["why"] for r in records if "skipped" in r}}
        | {"failed": [r["side"] for r in records if r.get("outcome") == "fail"]}
    )


def _of(lines: Sequence[Record], side: str, name: str) -> list[Any]:
    return [line[name] for line in lines if line["side"] == side and name in line]


def _iterations(lines: Sequence[Record], side: str, phase: str) -> list[Record]:
    """Skip the first iteration, which warms up; an earlier phase did so for equal ones."""
    found = [line for line in lines if line["side"] == side and line.get("phase") == phase]
    return found[1:]


def _ratio(lines: Sequence[Record], case: str, peer: str, phase: str) -> float | None:
    """Return the seconds per written token of the peer / ours."""
    each = [
        [i["wall_s"] / i["written"] for i in _iterations(lines, f"{case}/{side}", phase)]
        for side in (peer, "ours")
    ]
    return median(each[0]) / median(each[1]) if all(each) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if no side failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all together")
    parser.add_argument("--only", choices=list(TASKS), help="one of the two tasks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--iterations", type=int, default=3, help="by lot; the first warms up")
    parser.add_argument("--equal", type=int, default=2, help="iterations of equal lengths")
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="our max_tokens_per_micro_batch; else the default"
    )
    parser.add_argument("--best", type=json.loads, default=BEST, help="TRL's settings, as JSON")
    parser.add_argument("--scratch", type=Path, help="where models and output stay")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not sees_cuda():
        print("peers: torch sees no CUDA device; --device cpu tries ours", file=sys.stderr)
        return 2
    tasks = {
        name: replace(
            task,
            iterations=options.iterations,
            equal_iterations=min(options.equal, 0 if task.lora else options.equal),
            max_tokens_per_micro_batch=options.micro_batch_tokens,
        )
        for name, task in TASKS.items()
        if options.only in (None, name)
    }
    # Else a polite end would leave the running side behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        scratch = options.scratch
        if scratch is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        scratch.mkdir(parents=True, exist_ok=True)
        sides = sides_of(tasks, options.best)
        lines, records = run_all(
            sides,
            options.device,
            scratch,
            options.seconds,
            lambda line: print(json.dumps(line), flush=True),
        )
    summary = summary_of(lines, records, options.device)
    print(json.dumps(summary), flush=True)
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
