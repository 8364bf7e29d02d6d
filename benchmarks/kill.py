"""Kill a training run at random points, let it go on, and compare it with one that was not killed.

    python -m benchmarks.kill --points 20

The run is the command that a user gives: ``lightning-rl fit ... --ckpt_path last``, here on the
sort-digits task with a critic of its own, a moving reference and an adaptive coefficient, for six
iterations in two epochs. A point names a stage and an iteration; there the process gets a SIGKILL
(from itself, or from a thread of it, so that stages of a few milliseconds are hit too). The same
command is then given again until it ends well. "equal" means: weights, optimizer, schedule,
coefficients, random states and data cursor by torch.equal; every row of metrics but for times; and
every rollout of every iteration, token by token with its logprobs.

With ``--program`` each rollout is a program that asks the model twice, and in the killed runs a
third of these programs are killed too, between their calls.

With ``--quantization NF4`` a LoRA is trained, whose frozen base is packed in few bits.

With ``--pictures`` a tiny model that sees is trained, its tower too, on questions about pictures,
and a reward looks at them.

With ``--collector AsyncCollector`` runs are not repeatable, so other things are checked: that every
prompt that was drawn was trained on exactly once or is still waiting in the last checkpoint, and
that no token was staler than allowed.

The last line is JSON.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from PIL.Image import Image

from benchmarks import forked
from lightning_rl.callbacks import RLCallback
from lightning_rl.rollout import Message, as_text
from lightning_rl.vision.loading import decode
from recipes.sort_digits.prepare import prepare
from tests.support.tiny_vision import picture, save_vision_model

ITERATIONS, PER_EPOCH, GROUPS, GROUP_SIZE = 6, 3, 4, 4
STAGES = ("collect", "backward", "between_steps", "save", "epoch_end", "any")
TIMES = ("time/", "cpu_s", "sync/seconds", "rollout/tokens_per_s")


class KillSelf(RLCallback):
    """Ends the process with SIGKILL in a stage of an iteration (0 is the first).

    ``after`` is a share of the stage: how many optimizer steps, or how much of the seconds given.
    """

    def __init__(self, stage: str, iteration: int, after: float, seconds: float) -> None:
        self.stage, self.iteration, self.after, self.seconds = stage, iteration, after, seconds
        self.steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "any":
            self._later(self.after * self.seconds)

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "collect" and self._now(pl_module):
            self._later(self.after * self.seconds)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "backward" and self._now(pl_module):
            kill()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self.stage == "between_steps" and self._now(pl_module):
            self.steps += 1
            if self.steps == 2:  # the first one is done
                kill()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.stage == "save" and pl_module.iteration == self.iteration + 1:
            directory = Path(trainer.log_dir or ".") / "checkpoints"
            threading.Thread(target=kill_while_saving, args=[directory], daemon=True).start()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stage == "epoch_end" and pl_module.iteration == self.iteration + 1:
            kill()

    def _now(self, module: LightningModule) -> bool:
        return bool(module.iteration == self.iteration)

    def _later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_saving(directory: Path) -> None:
    """As soon as a part of a checkpoint is on disk."""
    while not any(p.stat().st_size > 0 for p in directory.glob("*.ckpt.partial") if p.exists()):
        time.sleep(1e-4)
    kill()


@dataclass
class Point:
    """Where one run is killed."""

    stage: str
    iteration: int
    after: float


def draw_points(count: int, seed: int) -> list[Point]:
    """All stages in turn; iteration and moment at random."""
    rng = random.Random(seed)
    points = []
    for number in range(count):
        stage = STAGES[number % len(STAGES)]
        epoch_ends = range(PER_EPOCH - 1, ITERATIONS, PER_EPOCH)
        iterations = epoch_ends if stage == "epoch_end" else range(ITERATIONS)
        points.append(Point(stage, rng.choice(list(iterations)), rng.random()))
    return points


def configuration(
    data: Path,
    out: Path,
    collector: str,
    engine: str,
    program: bool = False,
    quantization: str | None = None,
) -> dict[str, Any]:
    """The run, as a YAML file would say it."""
    model = {
        "model": str(data / "model"),
        "advantage": {"class_path": "GAE"},
        "value_head": {"class_path": "SharedValueHead"},
        "kl": {"class_path": "K3Penalty", "init_args": {"coef": {
            "class_path": "AdaptiveCoefficient", "init_args": {"value": 0.05, "target": 1e-4}}}},
        "reference": {"class_path": "PeriodicReference", "init_args": {"every_n_iterations": 2}},
        "correction": {"class_path": "TokenTIS"},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "lr_scheduler": {"class_path": "WarmupCosine",
                         "init_args": {"warmup_steps": 2, "total_steps": 24}},
        "minibatches": 2, "ppo_epochs": 2,
    }  # fmt: skip
    if quantization is not None:
        model["lora"] = {"rank": 4, "quantization": quantization}
    # One request after another, because what comes at the same time is chance with programs, and
    # others in a batch change the last bits of logprobs.
    started = {
        "VLLMLocal": {"max_model_len": 32},
        "TransformersEngine": {"device": "cpu", "max_batch_size": 1 if program else 256},
    }[engine]
    options = {
        "train_prompts": {"class_path": "JSONLPrompts",
                          "init_args": {"path": str(data / "train.jsonl")}},
        "eval_prompts": {"class_path": "JSONLPrompts",
                         "init_args": {"path": str(data / "heldout.jsonl")}},
        "rewards": ["recipes.sort_digits.reward.exact_match", "benchmarks.kill.distinct_digits"],
        "engine": {"class_path": engine, "init_args": started},
        "collector": {"class_path": collector},
        "sampling": {"max_tokens": 10},
        "groups_per_iteration": GROUPS, "group_size": GROUP_SIZE,
        "iterations_per_epoch": PER_EPOCH, "eval_limit": 4,
    }  # fmt: skip
    if program:
        script = str(Path(__file__).with_name("kill_program.py"))
        arguments = {"script": script, "preload": ["urllib.request"]}
        options["agent"] = {"class_path": "ScriptAgent", "init_args": arguments}
    callbacks: list[Any] = [
        {"class_path": "WeightSync"},
        {"class_path": "Evaluate", "init_args": {"every_n_iterations": 2}},
        {"class_path": "PreviewTable", "init_args": {"num_rollouts": GROUPS * GROUP_SIZE}},
        {"class_path": "RunReport"},
        {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 1}},
    ]
    return {
        "seed_everything": 0,
        "model": {"class_path": "PolicyModule", "init_args": model},
        "data": {"class_path": "RLDataModule", "init_args": options},
        "trainer": {
            "accelerator": "cpu", "devices": 1, "max_epochs": ITERATIONS // PER_EPOCH,
            "enable_model_summary": False, "enable_progress_bar": False,
            "logger": {"class_path": "TensorBoardLogger",
                       "init_args": {"save_dir": str(out), "name": "run"}},
            "callbacks": callbacks,
        },
    }  # fmt: skip


def distinct_digits(completions: list[str | list[Message]], **columns: Any) -> list[float]:
    """A reward that an untrained model earns too, so that advantages are not all zero."""
    return [len(set(as_text(completion))) / 10 for completion in completions]


def with_killed_programs(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """The same run, whose programs are killed too."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    agent = changed["data"]["init_args"]["agent"]["init_args"]
    (out / "programs").mkdir(parents=True)
    agent["env"] = {"KILL_DIR": str(out / "programs")}
    return changed


def prepare_pictures(folder: Path) -> None:
    """A tiny model that sees, and questions about pictures of three sizes."""
    save_vision_model(folder / "model", "qwen3_vl")
    for name, seeds in (("train", range(16)), ("heldout", range(16, 20))):
        lines = []
        for seed in seeds:
            decode(picture(seed, 32 + 16 * (seed % 3))).save(folder / f"{seed}.png")
            parts = [{"type": "image", "image": f"{seed}.png"}, {"type": "text", "text": "What?"}]
            lines.append(json.dumps({"prompt": [{"role": "user", "content": parts}]}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))


def with_pictures(config: dict[str, Any]) -> dict[str, Any]:
    """The same run, on them; all that sees is trained."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    vision = {"train_tower": True, "train_projector": True, "tower_lr": 1e-4}
    changed["model"]["init_args"]["vision"] = vision
    changed["data"]["init_args"]["rewards"] = ["benchmarks.kill.even_and_bright"]
    return changed


def even_and_bright(
    completion_ids: list[list[int]], pictures: list[Sequence[Image]]
) -> list[float]:
    """A reward that an untrained model earns, and that depends on what it saw."""
    light = [images[0].convert("L").getpixel((9, 9)) / 255 for images in pictures]  # type: ignore[operator]
    even = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    return [share * bright for share, bright in zip(even, light, strict=True)]


def run_command(config: dict[str, Any], out: Path, *options: str) -> int:
    """``lightning-rl fit --ckpt_path last`` in a process of its own; its exit status."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    arguments = ["fit", "--config", out / "config.yaml", "--ckpt_path", "last", *options]
    return forked.run("lightning_rl", arguments, out / "output.txt")


def armed(config: dict[str, Any], point: Point, seconds: float = 0.0) -> dict[str, Any]:
    """The run that kills itself at a point."""
    arguments = {"stage": point.stage, "iteration": point.iteration, "after": point.after,
                 "seconds": seconds}  # fmt: skip
    killer = {"class_path": "benchmarks.kill.KillSelf", "init_args": arguments}
    # First of all, so that its hooks come before the others' work, but for what they kill within.
    changed: dict[str, Any] = json.loads(json.dumps(config))
    changed["trainer"]["callbacks"].insert(0, killer)
    return changed


def killed_and_resumed(config: dict[str, Any], out: Path, point: Point, seconds: float) -> int:
    """Kill a run at a point and let it go on to its end; how many starts that took."""
    status = run_command(armed(config, point, seconds), out)
    if status == 0 and point.stage == "any":
        return 1  # it was faster this time
    if status != -signal.SIGKILL:
        raise SystemExit(f"the run was to be killed, but ended with {status}: {out}/output.txt")
    status = run_command(config, out)
    if status != 0:
        raise SystemExit(f"the resumed run ended with {status}: see {out}/output.txt")
    return 2


# ---------------------------------------------------------------- comparing


def run_directory(out: Path) -> Path:
    """A resumed run goes on in the same one, unless it was killed before its first checkpoint."""
    saved = [d for d in (out / "run").iterdir() if list((d / "checkpoints").glob("*.ckpt"))]
    (directory,) = saved
    return directory


def lines_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def final_state(directory: Path, iterations: int = ITERATIONS) -> dict[str, Any]:
    state = torch.load(directory / "checkpoints" / f"iteration_{iterations}.ckpt")
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "RLDataModule")
    own = {name: state["lightning_rl"][name] for name in ("iteration", "parts", "random")}
    return {name: state[name] for name in kept} | own


def differences(ours: Any, theirs: Any, where: str) -> list[str]:
    """Paths at which two nested values differ; tensors by torch.equal, to which NaN is NaN here."""
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
    """What differs between a killed run and the uninterrupted one."""
    ours, theirs = run_directory(out), run_directory(whole)
    ended, expected = final_state(ours, iterations), final_state(theirs, iterations)
    found = differences(ended, expected, "state")
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        found += differences(lines_of(ours / file), lines_of(theirs / file), file)
    return found


def check_async(out: Path, max_staleness: int = 1) -> list[str]:
    """What is wrong with an asynchronous run: prompts lost or trained on twice, stale tokens."""
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


# ---------------------------------------------------------------- the command


@contextmanager
def folder_of(keep: Path | None, prefix: str) -> Iterator[Path]:
    """Where the runs are: a folder that stays, or, if none is given, one that is deleted."""
    out = (keep or Path(tempfile.mkdtemp(prefix=prefix))).resolve()
    try:
        yield out
    finally:
        if keep is None:
            shutil.rmtree(out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill a run at random points and compare.")
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine", default="VLLMLocal", choices=["VLLMLocal", "TransformersEngine"]
    )
    parser.add_argument(
        "--collector", default="SyncCollector", choices=["SyncCollector", "AsyncCollector"]
    )
    parser.add_argument("--program", action="store_true", help="rollouts are programs")
    parser.add_argument(
        "--quantization", choices=["NF4", "Int8"], help="train a LoRA whose base is in few bits"
    )
    parser.add_argument("--pictures", action="store_true", help="train a model that sees")
    parser.add_argument("--keep", type=Path, help="a folder for the runs (default: deleted)")
    options = parser.parse_args(arguments)
    with folder_of(options.keep, "kill_") as out:
        return measure(options, out)


def measure(options: argparse.Namespace, out: Path) -> int:
    """Run everything, print the table; 0 if all points are equal."""
    (prepare_pictures if options.pictures else prepare)(out / "data")

    def config(name: str) -> dict[str, Any]:
        made = configuration(
            out / "data",
            out / name,
            options.collector,
            options.engine,
            options.program,
            options.quantization,
        )
        made = with_pictures(made) if options.pictures else made
        killed = options.program and name != "whole"
        return with_killed_programs(made, out / name) if killed else made

    if run_command(config("whole"), out / "whole") != 0:
        raise SystemExit(f"the uninterrupted run failed: see {out}/whole/output.txt")
    # So that a random moment is one of training, and a moment of collecting is within it.
    rows = (run_directory(out / "whole") / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((run_directory(out / "whole") / "summary.json").read_text())
    seconds = {"any": summary["wall_s"], "collect": summary["wall_s"] / len(rows) / 4}
    print(f"{'point':>5}  {'stage':<14}{'iteration':>9}  {'starts':>6}  equal", flush=True)
    equal = 0
    for number, point in enumerate(draw_points(options.points, options.seed), 1):
        name = f"point_{number}"
        share = seconds.get(point.stage, 0.0)
        starts = killed_and_resumed(config(name), out / name, point, share)
        if options.program and not list((out / name / "programs").iterdir()):
            raise SystemExit(f"no program of {name} was killed")
        asynchronous = options.collector == "AsyncCollector"
        found = check_async(out / name) if asynchronous else compare(out / name, out / "whole")
        equal += not found
        where = "any" if point.stage == "any" else point.iteration
        verdict = "no: " + "; ".join(found[:3]) if found else "yes"
        print(f"{number:>5}  {point.stage:<14}{where:>9}  {starts:>6}  {verdict}", flush=True)
        if not found and options.keep is None:
            shutil.rmtree(out / name)
    result = {"points": options.points, "equal": equal, "collector": options.collector,
              "engine": options.engine, "program": options.program, "pictures": options.pictures,
              "seed": options.seed}  # fmt: skip
    print(json.dumps(result))
    return 0 if equal == options.points else 1


if __name__ == "__main__":
    sys.exit(main())
