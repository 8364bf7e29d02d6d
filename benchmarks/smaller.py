"""Measure what a model keeps that is cut to fewer layers, and reads what the whole one writes.

    python -m benchmarks.smaller [--layers 20] [--save]

The whole one is `full-0` of `benchmarks.small_model`: SmolLM2-135M-Instruct after GRPO on five
tasks, trained if it is not there. The layers that change a text's hidden states least go (Men et
al. 2024, arXiv:2403.03853). The teacher answers questions of the five tasks, 1,920 times; the
smaller model reads these answers twice (recipes/smollm2/variants/texts.yaml), and takes the
forward KL over the teacher's 16 likeliest tokens. vLLM alone examines both (`benchmarks.exam`) on
questions whose facts neither has met.

The last line is JSON: accuracies of the teacher, and of the student before and after, also by task,
and the CPU seconds of recording and reading.
"""

import json
import resource
import shutil
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.small_model.figures import accuracy
from benchmarks.small_model.runs import (
    DATA,
    OUT,
    RUNS,
    TRAINED,
    Option,
    configs,
    examined,
    run,
    taught_by,
    trained,
)
from benchmarks.support.results import parser_of, report
from recipes.smollm2.prepare import prepare
from recipes.smollm2.weights import fetch

TEACHER = "full-0"
TAUGHT = ("grpo.yaml", "variants/five.yaml", "variants/teacher.yaml")
ITERATIONS = 24
"""The teacher writes so many batches, each of 10 groups of 8 answers."""
CHOSEN_BY = 16
"""Questions of each task by which layers are chosen."""


@torch.no_grad()
def influences(model: Any, texts: list[Tensor]) -> list[float]:
    """Return how much each layer changes hidden states: 1 - their cosine before and after.

    Each is a mean over all tokens of ``texts``, which are token ids (1, L).
    """
    sums = torch.zeros(len(model.model.layers), dtype=torch.double)
    for text in texts:
        # The last has passed the final norm too; that layer stays anyway.
        states = model(text, output_hidden_states=True).hidden_states
        for layer, (before, after) in enumerate(pairwise(states)):
            sums[layer] += (1 - torch.cosine_similarity(before, after, dim=-1)).mean().double()
    return (sums / len(texts)).tolist()


def questions() -> list[Any]:
    """Return the chats of the first questions of each task."""
    chats = []
    for task in TRAINED:
        with (DATA / "train" / f"{task}.jsonl").open(encoding="utf-8") as file:
            chats += [json.loads(line)["prompt"] for line in islice(file, CHOSEN_BY)]
    return chats


def cut(whole: Path, directory: Path, layers: int, chats: list[Any]) -> list[int]:
    """Write the model of those ``layers`` layers that change most; return which they are.

    The first and the last stay.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(whole)
    inner = range(1, len(model.model.layers) - 1)
    asked = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    found = influences(
        model, [tokenizer.apply_chat_template(chat, **asked)["input_ids"] for chat in chats]
    )
    most = sorted(inner, key=lambda layer: -found[layer])[: layers - 2]
    kept = sorted([0, *most, len(model.model.layers) - 1])
    model.model.layers = nn.ModuleList(model.model.layers[layer] for layer in kept)
    model.config.num_hidden_layers = layers
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return kept


def record(teacher: Path, texts: Path) -> float:
    """Let the teacher write, and keep its likeliest tokens; return the CPU seconds."""
    options: list[Option] = [
        *configs(TAUGHT),
        ("--model.model", teacher),
        taught_by(teacher),
        ("--iterations", ITERATIONS),
        ("--output", texts),
    ]
    return cpu_seconds([sys.executable, "-m", "lightning_rl", "rollout"], options)


def read(student: Path, texts: Path, name: str) -> Path:
    """Train the student on what was recorded; return its run directory."""
    options: list[Option] = [
        *configs([*TAUGHT, "variants/texts.yaml"]),
        ("--model.model", student),
        ("--data.path", texts),
        ("--trainer.logger.save_dir", OUT),
        ("--trainer.logger.name", name),
    ]
    run([sys.executable, "-m", "lightning_rl", "fit"], options)
    return OUT / name / "version_0"


def cpu_seconds(command: list[str], options: list[Option]) -> float:
    """Run a command; return the CPU seconds of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(command, options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=20)
    arguments = parser.parse_args()
    fetch(DATA / "model")
    prepare(DATA)
    teacher = trained(TEACHER, **RUNS[TEACHER]) / "hf"
    name = f"cut-{arguments.layers}"
    student, texts = OUT / name / "start", OUT / name / "texts.sqlite"
    # This is of an earlier measurement; the teacher stays.
    shutil.rmtree(OUT / name, ignore_errors=True)
    for exam in (OUT / "exams").glob(f"{name}*.json"):
        exam.unlink()
    kept = cut(teacher, student, arguments.layers, questions())
    print(f"layers {', '.join(map(str, kept))} stay", flush=True)
    recorded_s = record(teacher, texts)
    directory = read(student, texts, name)
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    exams = {
        "teacher": examined(TEACHER, teacher),
        "before": examined(f"{name}-before", student),
        "student": examined(name, directory / "hf"),
    }
    result = {
        **{who: accuracy(exam) for who, exam in exams.items()},
        "layers": kept,
        "tasks": {
            task: {who: accuracy(exam, [task]) for who, exam in exams.items()} for task in TRAINED
        },
        "recorded_cpu_s": recorded_s,
        "read_cpu_s": summary["cpu_s"],
    }
    report(f"smaller-{arguments.layers}", result, arguments.save)


if __name__ == "__main__":
    main()
