"""Four runs whose every bit is written down: what was collected, trained on, measured and learned.

    python -m benchmarks.same_runs --out before.json
    python -m benchmarks.same_runs --out after.json --compare before.json

Run it before and after a change that must change nothing. The runs are the quickstart's (28
iterations), one that works one step ahead of the trainer, one on two processes and one of several
turns (six iterations each), all with real vLLM and seed 0. Of each it holds a hash of every packed
batch, all metrics but times, and a hash of the weights at the end. With ``--compare`` it says where
two files first differ, and exits with 1 if they do. The last line is JSON.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

SORT, GAME = "recipes/sort_digits", "recipes/guess_digit"
SIX = ["--data.iterations_per_epoch", "6"]
RUNS = {
    "quickstart": [f"{SORT}/grpo.yaml"],
    "one_step_ahead": [
        f"{SORT}/grpo.yaml",
        f"{SORT}/variants/async.yaml",
        *SIX,
        "--data.collector",
        "OneStepOffCollector",
    ],
    "two_processes": [f"{SORT}/grpo.yaml", f"{SORT}/variants/ddp.yaml", *SIX],
    "several_turns": [f"{GAME}/grpo.yaml", *SIX],
}
PREPARED = {
    "runs/sort_digits/sft/hf": [
        ["recipes.sort_digits.prepare"],
        ["lightning_rl", "fit", "--config", f"{SORT}/sft.yaml"],
    ],
    "runs/guess_digit/sft/hf": [
        ["recipes.guess_digit.prepare", "--out", "runs/guess_digit"],
        ["lightning_rl", "fit", "--config", f"{GAME}/sft.yaml"],
    ],
}
TIMES = ("time/", "cpu_s", "wall_s", "sync/seconds", "tokens_per_s")


class Digests(Callback):
    """Writes a line of JSON per iteration into ``folder``: a hash of the batch, all metrics."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        digest = hashlib.sha256()
        for part in ("tokens", "rollouts"):
            for name in sorted(batch[part].keys()):
                digest.update(name.encode())
                digest.update(batch[part, name].detach().contiguous().cpu().numpy().tobytes())
        row = {"batch": digest.hexdigest(), "metrics": self._metrics(trainer)}
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        digest = hashlib.sha256()
        for name, tensor in sorted(pl_module.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        (self.folder / f"weights{trainer.global_rank}").write_text(digest.hexdigest())

    @staticmethod
    def _metrics(trainer: Trainer) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in sorted(trainer.callback_metrics.items())
            if not name.startswith(TIMES) and not name.endswith(TIMES)
        }


def prepare() -> None:
    """Data and warm-started models, where they are not there yet."""
    for made, commands in PREPARED.items():
        if not (Path(made) / "config.json").exists():
            for command in commands:
                run_module(*command)


def run_module(*command: str) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)


def record(name: str, options: list[str]) -> dict[str, Any]:
    """One run, as what its ranks wrote down."""
    with tempfile.TemporaryDirectory() as folder:
        configs = [part for option in options for part in _as_config(option)]
        run_module(
            "lightning_rl",
            "fit",
            *configs,
            "--trainer.logger.save_dir",
            folder,
            "--trainer.callbacks+=benchmarks.same_runs.Digests",
            "--trainer.callbacks.folder",
            folder,
        )
        ranks = sorted(Path(folder).glob("rank*.jsonl"))
        return {
            "batches": {p.stem: [json.loads(line) for line in p.open()] for p in ranks},
            "weights": {p.name: p.read_text() for p in sorted(Path(folder).glob("weights*"))},
        }


def _as_config(option: str) -> list[str]:
    return ["--config", option] if option.endswith(".yaml") else [option]


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Where two recordings differ, in the order of their keys."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in {**before, **after}
            for line in differences(before.get(key), after.get(key), f"{place}/{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{place}[{i}]")]
    same = before == after or (before != before and after != after)  # NaN is itself here
    return [] if same else [f"{place}: {before} before, {after} after"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS))
    args = parser.parse_args()
    prepare()
    recorded = {}
    for name in args.only:
        recorded[name] = record(name, RUNS[name])
        rows = recorded[name]["batches"]["rank0"]
        print(
            f"{name}: {len(rows)} iterations, weights {recorded[name]['weights']['weights0'][:16]}"
        )
        args.out.write_text(json.dumps(recorded, indent=1))
    if args.compare is None:
        print(json.dumps({"runs": len(recorded)}))
        return 0
    before = json.loads(args.compare.read_text())
    found = differences({name: before.get(name) for name in recorded}, recorded)
    for line in found[:20]:
        print(line)
    print(json.dumps({"runs": len(recorded), "differences": len(found)}))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
