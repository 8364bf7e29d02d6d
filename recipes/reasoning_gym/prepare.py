"""Make the reasoning-gym tasks: a small model, a BPE tokenizer of its own, questions, rationales.

    python -m recipes.reasoning_gym.prepare --out runs/reasoning_gym

Eight data sets of reasoning-gym in easy configurations. Held-out questions are drawn first, then
those of the warm start, then those of RL, and none is repeated: RL has nothing to learn from
questions whose answers the warm start has taught. Two tasks have too few for that. Every file is
the same on every run.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reasoning_gym import create_dataset
from transformers import AddedToken, Qwen2ForCausalLM, Qwen2Tokenizer

from recipes.reasoning_gym.rationales import RATIONALES
from recipes.sort_digits.prepare import (
    EOS,
    PAD,
    make_tokenizer,
    small_qwen2,
    write_missing,
    write_model,
)

Entry = dict[str, Any]
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 5},
    "letter_counting": {"min_words": 1, "max_words": 1},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "max_value": 25},
    "count_bits": {"max_n": 255},
    "fraction_simplification": {
        "min_value": 1, "max_value": 12, "min_factor": 1, "max_factor": 9, "styles": ["plain"],
    },
    "simple_equations": {
        "min_terms": 2, "max_terms": 2, "max_value": 6, "operators_weights": [0.5, 0.5, 0.0],
    },
}  # fmt: skip
TAGS = OPEN, CLOSE = "<answer>", "</answer>"
VOCABULARY_SIZE = 768  # 256 bytes, the rest is learnt
DRAWN, NUM_HELDOUT = 4_000, 64  # questions of a task, with repetitions; without
DRAWN_FOR_RL = 3 * DRAWN  # after these, with repetitions
FEWEST_FOR_RL = 500
SEED = 0


def draw_questions(task: str) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """Entries for (heldout, warm start, RL) with distinct questions, none in two of them.

    Of a task that has too few others, RL asks those of the warm start. reasoning-gym makes question
    i of seed s from s + i, so a seed further away is not enough: short tasks repeat questions.
    """
    entries = list(create_dataset(task, size=DRAWN + DRAWN_FOR_RL, seed=SEED, **TASKS[task]))
    first = {entry["question"]: entry for entry in entries[:DRAWN]}
    others = {e["question"]: e for e in entries[DRAWN:] if e["question"] not in first}
    shown = list(first.values())
    heldout, warm = shown[:NUM_HELDOUT], shown[NUM_HELDOUT:]
    return heldout, warm, list(others.values()) if len(others) >= FEWEST_FOR_RL else warm


def ask(entry: dict[str, Any]) -> str:
    return f"{entry['question'].strip()}\n"


def work_out(task: str, entry: dict[str, Any]) -> str:
    """A rationale, and the answer where the verifier looks for it."""
    return f"{RATIONALES[task](entry)}{OPEN}{entry['answer']}{CLOSE}"


def rl_rows(task: str, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows RL reads: a question, and the entry that only the verifier sees."""
    return [{"prompt": ask(entry), "entry": entry, "task": task} for entry in entries]


def sft_rows(train: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """As many rationales of every task, shuffled; a task with fewer questions repeats them."""
    rows = [
        {"prompt": ask(entry), "completion": work_out(task, entry)}
        for task, entries in train.items()
        for entry in itertools.islice(itertools.cycle(entries), DRAWN)
    ]
    random.Random(SEED).shuffle(rows)
    return rows


def train_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """A byte-level BPE trained on ``texts``. Digits stay alone; the tags are one token each."""
    tokenizer = make_tokenizer([PAD, EOS]).train_new_from_iterator(
        texts, VOCABULARY_SIZE - len(TAGS), show_progress=False
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def make_reasoner() -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 with 10.6M parameters, float32; leaves torch's RNG alone."""
    return small_qwen2(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=256,
        initializer_range=0.04,
    )


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, sft.jsonl, train/ and heldout/ of each task."""
    drawn = {task: draw_questions(task) for task in TASKS}
    rows = sft_rows({task: warm for task, (_, warm, _) in drawn.items()})
    files = {"sft.jsonl": rows}
    for task, (heldout, _, train) in drawn.items():
        files |= {
            f"train/{task}.jsonl": rl_rows(task, train),
            f"heldout/{task}.jsonl": rl_rows(task, heldout),
        }
    for folder in ("train", "heldout"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    write_missing(out, files)
    if not (out / "model").exists():
        # The answers, such as words spelled backward, are nothing to find common pieces in.
        texts = (row["prompt"] + row["completion"].partition(OPEN)[0] for row in rows)
        write_model(out / "model", make_reasoner(), train_tokenizer(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the reasoning-gym model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/reasoning_gym"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
