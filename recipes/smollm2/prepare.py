"""Fetch SmolLM2-135M-Instruct, and write questions to train on and others to be examined on.

    python -m recipes.smollm2.prepare --out runs/smollm2

``train.jsonl`` and ``heldout.jsonl`` are the quickstart's, of two tasks. ``train/<task>.jsonl`` and
``heldout/<task>.jsonl`` have one task each. A line holds a chat's messages and the answer. No fact
of a held-out question (``tasks.py``) is among those that are trained on. The files are the same on
every run; a model that is there already stays.
"""

import argparse
import json
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

from recipes.smollm2.tasks import ASKED, TASKS, Question, questions
from recipes.smollm2.weights import fetch

NUM_TRAIN, NUM_HELD_OUT = 4_000, 128
QUICKSTART = ("products", "largest")


def write(path: Path, asked: Iterable[Question]) -> None:
    """Write questions as rows of ``prompt`` and ``answer``.

    A file that holds them already is left alone: a run may be reading it.
    """
    chats = (([{"role": "user", "content": f"{q.text} {ASKED}"}], q.answer) for q in asked)
    rows = (json.dumps({"prompt": chat, "answer": answer}) for chat, answer in chats)
    text = "".join(f"{row}\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def prepare(out: Path) -> None:
    """Write the questions of all tasks."""
    for name, held_out, number in (("train", False, NUM_TRAIN), ("heldout", True, NUM_HELD_OUT)):
        asked = {task: list(islice(questions(task, held_out), number)) for task in TASKS}
        for task, of_task in asked.items():
            write(out / name / f"{task}.jsonl", of_task)
        turns = zip(*(asked[task] for task in QUICKSTART), strict=False)
        write(out / f"{name}.jsonl", chain.from_iterable(turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    given = parser.parse_args()
    prepare(given.out)
    fetch(given.out / "model")
    print(f"wrote questions and model to {given.out}")


if __name__ == "__main__":
    main()
