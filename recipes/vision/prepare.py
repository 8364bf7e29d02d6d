"""Make the vision task: a small model that sees, its tokenizer and image processor, and prompts.

    python -m recipes.vision.prepare --out runs/vision

The model is a Qwen2.5-VL in small: a vision tower, a projector, and a language model that reads a
token for each 28×28 pixels. Pictures of the prompts are PNG files beside them, drawn once and no
picture twice, held-out ones first. Every file is the same on every run.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AddedToken,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from recipes.sort_digits.prepare import write_missing, write_model
from recipes.vision.draw import TASKS, Question

PAD, EOS = "<|endoftext|>", "<|im_end|>"
SPECIAL = [PAD, EOS, "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>"]  # of which the model's code needs to know, though it sees no video
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
VOCABULARY_SIZE = 384  # 256 bytes, the special tokens, the rest is learnt
NUM_TRAIN, NUM_HELDOUT = 3_000, 384  # questions, a third of each task
SEED = 0
Row = dict[str, Any]


def questions(seed: int) -> Iterator[Question]:
    """Yield questions without end, the tasks in turn."""
    rng = random.Random(seed)
    for task in itertools.cycle(TASKS.values()):
        yield task(rng)


def png_of(question: Question) -> bytes:
    file = BytesIO()
    question.picture.save(file, "PNG")
    return file.getvalue()


def chat_of(question: Question) -> list[Row]:
    content = [{"type": "image"}, {"type": "text", "text": question.text}]
    return [{"role": "user", "content": content}]


def rl_row(question: Question, path: str) -> Row:
    """Return a row that RL reads: the picture's path is in a column, and its place in the chat."""
    return {
        "prompt": chat_of(question),
        "images": [path],
        "answer": question.answer,
        "task": question.task,
    }


def write_pictures(out: Path) -> list[Row]:
    """Write the pictures and return a row for each question, held-out ones first; none twice."""
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}
    for question in questions(SEED):
        data = png_of(question)
        name = f"pictures/{sha256(data).hexdigest()[:16]}.png"
        if name not in rows:
            (out / name).write_bytes(data)
            rows[name] = rl_row(question, name)
        if len(rows) == NUM_HELDOUT + NUM_TRAIN:
            return list(rows.values())
    raise AssertionError("questions never end")


def heldout_of(rows: Sequence[Row], task: str) -> list[Row]:
    """Return a task's rows for a file in a folder of its own: paths are relative to the file."""
    mine = (row for row in rows if row["task"] == task)
    return [row | {"images": [f"../{name}" for name in row["images"]]} for row in mine]


def make_tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """Train a byte-level BPE on ``texts``, with a chat template. Digits stay alone."""
    bare = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(SPECIAL)},
        merges=[],
        unk_token=None,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
    )
    tokenizer = bare.train_new_from_iterator(
        texts, VOCABULARY_SIZE, new_special_tokens=SPECIAL[2:], show_progress=False
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL], True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Make a random Qwen2.5-VL with 2.6M parameters; leave torch's RNG alone."""
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.05,
            # Half of a head's 32 dimensions turn with (time, row, column).
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": ids[EOS],
            "pad_token_id": ids[PAD],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 3,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [0, 1],
            "out_hidden_size": 128,
            "initializer_range": 0.05,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Qwen2_5_VLForConditionalGeneration(config)


def make_image_processor() -> Qwen2VLImageProcessorPil:
    """Cuts a picture into patches of 14×14 pixels; up to 112×112 it keeps its size.

    White paper is zero, so that what is drawn stands out from the start.
    """
    return Qwen2VLImageProcessorPil(
        min_pixels=28 * 28, max_pixels=112 * 112, image_mean=[1.0] * 3, image_std=[0.5] * 3
    )


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, pictures/, train.jsonl, heldout/."""
    (out / "heldout").mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        asked = list(itertools.islice(questions(SEED), 300))
        texts = [f"system\nuser\n{q.text}\nassistant\n{q.answer}" for q in asked]
        tokenizer = make_tokenizer(texts)
        # First: a model without it would not be whole.
        make_image_processor().save_pretrained(out / "model.partial")
        write_model(out / "model", make_model(tokenizer), tokenizer)
    files = [f"heldout/{task}.jsonl" for task in TASKS]
    if not all((out / name).exists() for name in ("train.jsonl", *files)):
        rows = write_pictures(out)
        heldout = [heldout_of(rows[:NUM_HELDOUT], task) for task in TASKS]
        write_missing(
            out, {"train.jsonl": rows[NUM_HELDOUT:], **dict(zip(files, heldout, strict=True))}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the vision model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/vision"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
