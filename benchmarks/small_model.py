"""Measure what SmolLM2-135M-Instruct learns of five tasks, here and with TRL's same settings.

    python -m benchmarks.small_model [--only full-0 trl] [--save]

Trains by recipes/smollm2 with its variant `five.yaml`: three seeds, a LoRA, TRL (in the environment
of `benchmarks.peers`), and for 20 iterations five other learning rates. The models are examined by
vLLM alone (`benchmarks.exam`) on 128 held-out questions of each task, and on two tasks that were
not trained on; so is the untrained one, also with 256 tokens and greedily. Each takes 7 to 30
minutes of one core. What is done stays in runs/small_model: `--only` makes some of it, so that
several can run side by side; delete a folder to measure it again.

The last line is JSON: accuracy before and after, the mean over seeds; the gain and its 95 %
interval, over questions and seeds; TRL's accuracy, and the CPU seconds of all iterations over
TRL's, of seed 0 on both sides.
``--save`` also keeps it in benchmarks/results, and writes the figure and tables of the recipe; with
``--only`` the tables of what is named.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.peers_layouts import PEER_PYTHON, make_environment
from benchmarks.results import parser_of, report, write_block
from benchmarks.seed_curves import draw
from recipes.smollm2.prepare import prepare
from recipes.smollm2.tasks import TASKS
from recipes.smollm2.weights import fetch

ROOT = Path(__file__).parents[1]
DATA, OUT = Path("runs/smollm2"), Path("runs/small_model")
RECIPE = "recipes/smollm2"
PAGE = ROOT / RECIPE / "README.md"
FIGURE = ROOT / "docs" / "images" / "small-model.png"
PICTURE = (
    "![Right answers in training over iterations, and of each task before and after]"
    "(../../docs/images/small-model.png)"
)
TRAINED = ("products", "largest", "letters", "sums", "stories")
GROUPS, GROUP_SIZE, MAX_TOKENS = 10, 8, 32
ITERATIONS, SHORT = 40, 20
LR, LORA_LR = 2e-5, 2e-4
SEEDS = (0, 1, 2)
FULL: dict[str, dict[str, Any]] = {f"full-{seed}": {"lr": LR, "seed": seed} for seed in SEEDS}
LORA: dict[str, dict[str, Any]] = {"lora-0": {"lr": LORA_LR, "lora": True}}
SWEEP: dict[str, dict[str, Any]] = {
    **{f"full-{lr:.0e}": {"lr": lr, "iterations": SHORT} for lr in (1e-5, 4e-5, 8e-5)},
    **{f"lora-{lr:.0e}": {"lr": lr, "iterations": SHORT, "lora": True} for lr in (4e-4, 8e-4)},
}
RUNS = FULL | LORA | SWEEP
EXAMS: dict[str, dict[str, object]] = {
    "untrained": {},
    "untrained-long": {"--max-tokens": 256, "--temperature": 0},
}
"""Exams of the untrained model: as in training, and greedily with eight times as many tokens."""
TRL = "trl"
FIVES = (0, 5, 10, 15, 25, 35)
"""Where the blocks of five iterations begin whose rewards are shown."""
PACKAGES = "lib/python3*/site-packages"
STUDENT_T = 4.303
"""The 0.975 quantile of Student's t with two degrees of freedom: three seeds."""


def trained(
    name: str,
    lr: float,
    seed: int = 0,
    lora: bool = False,
    iterations: int = ITERATIONS,
    teacher: str | None = None,
) -> Path:
    """The run directory of a configuration, trained if it is not there yet.

    ``teacher`` is the run whose model is the teacher; None: the model learns from rewards.
    """
    directory = OUT / name / "version_0"
    if not (directory / "hf" / "config.json").exists():
        files = ["grpo.yaml", "variants/five.yaml", *(["variants/lora.yaml"] if lora else [])]
        taught: list[tuple[str, object]] = []
        if teacher is not None:
            files.append("variants/teacher.yaml")
            arguments = {"model": str(OUT / teacher / "version_0" / "hf"), "top_k": 16}
            other = {"class_path": "lightning_rl.ModelTeacher", "init_args": arguments}
            taught = [("--data.rewards", json.dumps(["recipes.smollm2.tasks.last_number", other]))]
        # Accuracy is told by the exams, and by the reward of each iteration.
        export = {"class_path": "HFExport", "init_args": {"merge_adapters": lora}}
        options: list[tuple[str, object]] = [
            *(("--config", f"{RECIPE}/{file}") for file in files),
            ("--seed_everything", seed),
            ("--model.optimizer.init_args.lr", lr),
            ("--data.iterations_per_epoch", iterations),
            ("--trainer.logger.save_dir", OUT),
            ("--trainer.logger.name", name),
            ("--trainer.callbacks", json.dumps([{"class_path": "RunReport"}, export])),
            *taught,
            *([("--ckpt_path", "last")] if directory.exists() else []),  # it was stopped
        ]
        run([sys.executable, "-m", "lightning_rl", "fit"], options)
    return directory


def trained_by_trl() -> Path:
    """The directory of TRL's run."""
    directory = OUT / TRL
    if not (directory / "measured_0.json").exists():
        make_environment()
        options = {"data": DATA, "out": directory, "lr": LR, "iterations": ITERATIONS}
        environment = os.environ | {
            "TRL_PACKAGES": ":".join(map(str, PEER_PYTHON.parents[1].glob(PACKAGES))),
            "HF_HUB_OFFLINE": "1",
            "VLLM_PLUGINS": "",
        }
        command = [sys.executable, "-m", "benchmarks.small_model_trl"]
        run(command, [(f"--{name}", value) for name, value in options.items()], environment)
    return directory


def run(
    command: list[str],
    options: Iterable[tuple[str, object]],
    environment: dict[str, str] | None = None,
) -> None:
    words = [str(word) for option in options for word in option]
    subprocess.run([*command, *words], check=True, env=environment)


def examined(name: str, model: Path) -> dict[str, Any]:
    """Return the result of a model's exam, which is held if it was not yet."""
    path = OUT / "exams" / f"{name}.json"
    if not path.exists():
        command = [sys.executable, "-m", "benchmarks.exam", str(model), "--out", str(path)]
        run(command, EXAMS.get(name, {}).items())
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def measured(name: str) -> dict[str, Any]:
    """The exam of a model, and the rewards and CPU seconds of its training by iteration.

    The untrained model has the first alone, and what was trained for a learning rate the second.
    """
    if name in EXAMS:
        return examined(name, DATA / "model")
    if name == TRL:
        directory = trained_by_trl()
        progress = json.loads((directory / "measured_0.json").read_text(encoding="utf-8"))
        found = {"rewards": progress["rewards"], "cpu_s": progress["cpu_s"]}
    else:
        directory = trained(name, **RUNS[name])
        found = rewards_and_seconds(directory)
    return found if name in SWEEP else found | examined(name, directory / "hf")


def rewards_and_seconds(directory: Path) -> dict[str, Any]:
    """The mean reward and the CPU seconds of each iteration of a run."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    seconds = [after["cpu_s"] - before["cpu_s"] for before, after in pairwise(rows)]
    return {"rewards": rewards, "cpu_s": seconds}


def accuracy(one: Mapping[str, Any], tasks: Sequence[str] = TRAINED) -> float:
    """The share of right answers; each task counts as much."""
    return fmean(fmean(one["right"][task]) for task in tasks)


def gain(before: Mapping[str, Any], after: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The gain in accuracy, and half of its 95 % interval over questions and seeds.

    The half is the root of the sum of two squares: 1.96 standard errors over questions (of a
    question's gain, which is averaged over seeds), and Student's t of the mean over three seeds.
    """
    first = [right for task in TRAINED for right in before["right"][task]]
    last = [[right for task in TRAINED for right in one["right"][task]] for one in after]
    of_question = [fmean(rights) - right for right, *rights in zip(first, *last, strict=True)]
    of_seed = [fmean(rights) - fmean(first) for rights in last]
    over_questions = 1.96 * stdev(of_question) / math.sqrt(len(of_question))
    over_seeds = STUDENT_T * stdev(of_seed) / math.sqrt(len(of_seed))
    return fmean(of_question), math.hypot(over_questions, over_seeds)


def tasks_table(found: Mapping[str, Any]) -> list[str]:
    """A row per task: the untrained model, also greedily and at length, and each seed."""
    titles = {
        "untrained": "untrained",
        "untrained-long": "untrained, greedy, 256 tokens",
        **{name: f"seed {one['seed']}" for name, one in FULL.items()},
        **dict.fromkeys(LORA, "a LoRA"),
        TRL: "TRL",
    }
    exams = {title: found[name] for name, title in titles.items() if name in found}
    lines = [row(["task", *exams]), row(["---"] * (1 + len(exams)))]
    rows = {f"`{task}`": [task] for task in TRAINED} | {"**all five**": TRAINED}
    rows |= {f"`{task}`, not trained on": [task] for task in TASKS if task not in TRAINED}
    for title, tasks in rows.items():
        lines.append(row([title, *(f"{accuracy(exam, tasks):.2f}" for exam in exams.values())]))
    lines.append(row(["tokens of an answer", *(f"{e['tokens']:.0f}" for e in exams.values())]))
    lines.append(row(["cut off", *(f"{exam['cut_off']:.0%}" for exam in exams.values())]))
    return lines


def rates_table(found: Mapping[str, Any]) -> list[str]:
    """A row per way to train and learning rate, all of seed 0: rewards in training."""
    titles = ["trained", "learning rate", *(f"iterations {a + 1}-{a + 5}" for a in FIVES)]
    lines = [row(titles), row(["---"] * len(titles))]
    ways = {name: one for name, one in RUNS.items() if not one.get("seed")} | {TRL: {"lr": LR}}
    known = [item for item in ways.items() if item[0] in found]
    for name, one in sorted(known, key=lambda way: (way[0][:4], way[1]["lr"])):
        what = "TRL, all weights" if name == TRL else "a LoRA" if "lora" in one else "all weights"
        rewards = found[name]["rewards"]
        fives = (rewards[a : a + 5] for a in FIVES)
        cells = [f"{fmean(five):.2f}" if five else "" for five in fives]
        lines.append(row([what, f"{one['lr']:.0e}", *cells]))
    return lines


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def curves(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For the figure: a seed's accuracy in training, as the mean of five iterations."""
    return [
        {
            "seed": one["seed"],
            "iterations": list(range(5, ITERATIONS + 1, 5)),
            "accuracy": [
                fmean(found[name]["rewards"][i - 5 : i]) for i in range(5, ITERATIONS + 1, 5)
            ],
        }
        for name, one in FULL.items()
    ]


def summary_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the last line."""
    before, after = found["untrained"], [found[name] for name in FULL]
    mean, half = gain(before, after)
    ours, trl = found["full-0"]["cpu_s"], found[TRL]["cpu_s"]
    return {
        "accuracy_before": accuracy(before),
        "accuracy_after": fmean(map(accuracy, after)),
        "gain": mean,
        "interval_low": mean - half,
        "interval_high": mean + half,
        "accuracy_trl": accuracy(found[TRL]),
        "seconds_over_trl": sum(ours) / sum(trl),
        "seconds_over_trl_first_20": sum(ours[:20]) / sum(trl[:20]),
        "tasks": {
            task: {
                "before": accuracy(before, [task]),
                "after": fmean(accuracy(one, [task]) for one in after),
            }
            for task in TASKS
        },
        "runs": {
            name: {key: value for key, value in one.items() if key != "right"}
            | ({"accuracy": {t: accuracy(one, [t]) for t in TASKS}} if "right" in one else {})
            for name, one in found.items()
        },
    }


def main() -> None:
    parser = parser_of(__doc__)
    names = [*EXAMS, *RUNS, TRL]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    fetch(DATA / "model")
    prepare(DATA)
    found = {name: measured(name) for name in arguments.only}
    whole = len(found) == len(names)
    print("\n".join([*tasks_table(found), "", *rates_table(found)]))
    if arguments.save:
        write_block(PAGE, "tasks", [*([PICTURE, ""] if whole else []), *tasks_table(found)])
        write_block(PAGE, "rates", rates_table(found))
    if not whole:
        return
    result = summary_of(found)
    if arguments.save:
        title = "Right answers in training, mean of five iterations"
        draw(curves(found), result["tasks"], str(FIGURE), title)
    report("small-model", result, arguments.save)


if __name__ == "__main__":
    main()
