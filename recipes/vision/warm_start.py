"""Run the warm start: learn to see, by imitating answers of two conventions.

    python -m recipes.vision.warm_start --out runs/vision

Plain PyTorch: every step draws pictures that no prompt has, and the model learns the tokens of
their answers. Half of them count from zero, read from right to left, or name the column before the
row, so the model knows more than it is asked for; RL has to find out what is meant, and goes on to
learn to see. The
last lines say how often it is right on held-out prompts, sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)

from recipes.sort_digits.prepare import write_model
from recipes.vision.draw import TASKS, Question
from recipes.vision.prepare import EOS, PAD, chat_of, prepare, questions

STEPS, BATCH, LR = 900, 32, 2e-3
OTHERS = 0.5  # share of answers in the other convention
SEED = 1  # of other pictures than the prompts'
IGNORED = -100  # of transformers: tokens without a loss
PLACE = "<|image_pad|>"


class Encoder:
    """Turns pictures with their chats into what the model takes."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.image_processor = AutoImageProcessor.from_pretrained(model, backend="pil")
        self.place = self.tokenizer.convert_tokens_to_ids(PLACE)

    def __call__(
        self, pictures: Sequence[Image.Image], chats: Sequence[Any], answers: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return a batch, padded on the left; labels are the answers' tokens. No answer: none."""
        seen = self.image_processor(images=list(pictures), return_tensors="pt")
        tokens = seen["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2
        texts = [
            self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in chats
        ]
        asked = [
            self.tokenizer(text.replace(PLACE, PLACE * int(count)))["input_ids"]
            for text, count in zip(texts, tokens, strict=True)
        ]
        said = [self.tokenizer(answer + EOS)["input_ids"] if answer else [] for answer in answers]
        longest = max(len(a) + len(b) for a, b in zip(asked, said, strict=True))
        ids = torch.full((len(asked), longest), self.tokenizer.convert_tokens_to_ids(PAD))
        labels = torch.full_like(ids, IGNORED)
        mask = torch.zeros_like(ids)
        for row, (question, answer) in enumerate(zip(asked, said, strict=True)):
            begin = longest - len(question) - len(answer)
            ids[row, begin:] = torch.tensor(question + answer)
            mask[row, begin:] = 1
            if answer:
                labels[row, -len(answer) :] = torch.tensor(answer)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": (ids == self.place).int(),
            "labels": labels,
            **seen,
        }


def shown(drawn: Iterator[Question]) -> Iterator[tuple[Question, str]]:
    """Yield questions, each with its answer in one of the conventions, drawn at random."""
    rng = random.Random(SEED)
    for question in drawn:
        yield question, question.other if rng.random() < OTHERS else question.answer


def train(model: Any, encode: Encoder, steps: int) -> None:
    """Imitate answers to questions drawn as they are needed."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    examples = shown(questions(SEED))
    begun = time.monotonic()
    for step in range(1, steps + 1):
        batch, answers = zip(*itertools.islice(examples, BATCH), strict=True)
        inputs = encode([q.picture for q in batch], [chat_of(q) for q in batch], answers)
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.monotonic() - begun
            print(f"step {step:,}  loss {float(loss):.3f}  {seconds:.0f} s", flush=True)


def accuracy(model: Any, encode: Encoder, file: Path) -> float:
    """Measure how often an answer sampled at temperature 1 is right."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    right = 0
    for begin in range(0, len(rows), BATCH):
        part = rows[begin : begin + BATCH]
        pictures = [Image.open(file.parent / row["images"][0]).convert("RGB") for row in part]
        inputs = encode(pictures, [row["prompt"] for row in part], [""] * len(part))
        length = inputs["input_ids"].shape[1]
        del inputs["labels"]
        told = model.generate(**inputs, max_new_tokens=6, do_sample=True, top_k=0, top_p=1.0)
        for row, said in zip(part, told[:, length:].tolist(), strict=True):
            text = encode.tokenizer.decode(said).partition(EOS)[0]
            right += text == row["answer"]
    return right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Warm-start the vision model.")
    parser.add_argument("--out", type=Path, default=Path("runs/vision"))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    prepare(out)
    if (out / "warm").exists():
        print(f"{out / 'warm'} is there already; delete it to make it anew")
        return
    torch.manual_seed(SEED)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(out / "model")
    encode = Encoder(out / "model")
    train(model, encode, arguments.steps)
    encode.image_processor.save_pretrained(out / "warm.partial")
    write_model(out / "warm", model, encode.tokenizer)
    for task in TASKS:
        share = accuracy(model, encode, out / "heldout" / f"{task}.jsonl")
        print(f"{task}: {share:.2f} right")


if __name__ == "__main__":
    main()
