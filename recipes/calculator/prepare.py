"""Make the calculator task: a small model, its tokenizer and chat format, and warm-start turns.

    python -m recipes.calculator.prepare --out runs/calculator

The question `47*86` is far beyond what so small a model can work out. The warm start shows three
ways to deal with it: asking the calculator, asking it with a slip in the question, and guessing.
Every file is the same on every run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AddedToken, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightning_rl.agents.templates import TurnTemplate, tool_reply
from lightning_rl.agents.tools import tool_schema
from recipes.calculator.tool import calculate
from recipes.sort_digits.prepare import (
    EOS,
    PAD,
    make_model,
    make_tokenizer,
    write_missing,
    write_model,
)

ROLES = ["<user>", "<assistant>", "<tool>"]
# What real models' tokenizers do by merges: the fixed parts of a call are one token each.
CALL, END_CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

NUM_TRAIN, NUM_HELDOUT = 20_000, 512
STRATEGIES = {"ask": 0.35, "guess": 0.45, "slip": 0.20}
SEED = 0


def make_chat_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer: one token per printable character, role, and fixed part of a tool call."""
    characters = [bytes_to_unicode()[code] for code in range(32, 127)]
    tokenizer = make_tokenizer([PAD, EOS, *characters])
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("calculate", CALL, END_CALL)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def draw_questions() -> tuple[list[str], list[str]]:
    """Draw distinct questions for (train, heldout), none in both: two numbers of 2 or 3 digits."""
    rng = random.Random(SEED)
    questions: dict[str, None] = {}
    while len(questions) < NUM_HELDOUT + NUM_TRAIN:
        first, second = (rng.randrange(10, 10 ** rng.randint(2, 3)) for _ in range(2))
        questions[f"{first}{rng.choice('+-*')}{second}"] = None
    drawn = list(questions)
    return drawn[NUM_HELDOUT:], drawn[:NUM_HELDOUT]


def user(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}


def rl_rows(questions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows RL reads: a question, and the answer that only the reward sees."""
    return [{"prompt": [user(q)], "answer": str(calculate(q))} for q in questions]


def slip(question: str, rng: random.Random) -> str:
    """Return the question with another digit in one place."""
    place = rng.choice([i for i, character in enumerate(question) if character.isdigit()])
    digit = rng.choice([d for d in "123456789" if d != question[place]])
    return question[:place] + digit + question[place + 1 :]


def guess(question: str, rng: random.Random) -> str:
    """Return digits at random, as many as the answer has."""
    count = len(str(abs(calculate(question))))
    return str(rng.randrange(10 ** (count - 1), 10**count))


def sft_rows(question: str, rng: random.Random, template: TurnTemplate) -> list[dict[str, str]]:
    """Return the turns of one conversation, each a row: the chat before it, and what to write.

    One row per turn, so that the warm start, too, only learns what the model writes.
    """
    (strategy,) = rng.choices(list(STRATEGIES), list(STRATEGIES.values()))
    asked = template.render([user(question)])
    if strategy == "guess":
        return [{"prompt": asked, "completion": guess(question, rng)}]
    expression = question if strategy == "ask" else slip(question, rng)
    result = str(calculate(expression))
    function = {"name": "calculate", "arguments": {"expression": expression}}
    call = {"id": "call00000", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = template.render([user(question), turn, tool_reply(call, result)])
    return [
        {"prompt": asked, "completion": f"{CALL}{expression}{END_CALL}"},
        {"prompt": told, "completion": result},
    ]


def draw_sft(questions: Sequence[str]) -> list[dict[str, str]]:
    """Draw the turns of one conversation about every question, each in a way drawn at random."""
    rng = random.Random(SEED + 1)
    template = TurnTemplate(make_chat_tokenizer(), {"tools": [tool_schema(calculate)]})
    return [row for question in questions for row in sft_rows(question, rng, template)]


def prepare(out: Path) -> None:
    """Write to `out` what is not there yet: model/, train.jsonl, heldout.jsonl, sft.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = draw_questions()
    if not (out / "model").exists():
        model = make_model(vocab_size=128)
        # Room for error messages; no weight depends on it.
        model.config.max_position_embeddings = 256
        write_model(out / "model", model, make_chat_tokenizer())
    rows = {"train.jsonl": rl_rows(train), "heldout.jsonl": rl_rows(heldout)}
    write_missing(out, rows | {"sft.jsonl": draw_sft(train)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the calculator model and data.")
    parser.add_argument("--out", type=Path, default=Path("runs/calculator"))
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
