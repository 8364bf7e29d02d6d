"""Rewards, tools, environments and callbacks of the corpus: sound ones, and some with a fault."""

import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_rl.agents.base import Environment, Reply
from lightning_rl.collect.collector import GroupFilter
from lightning_rl.data.sources import JSONLPrompts
from lightning_rl.data.tables import ListTable, Table
from lightning_rl.rollout import Prompt, Rollout, as_text

_NUMBER = re.compile(r"-?\d+")


def right(completions: list[Any], answer: list[str]) -> list[float]:
    """Return 1 where the last number is the answer."""
    pairs = zip(map(as_text, completions), answer, strict=True)
    return [float(([*_NUMBER.findall(text)] or [""])[-1] == a) for text, a in pairs]


def half(completions: list[Any], answer: list[str]) -> list[float]:
    """Return a half where the last number is the answer: less than ``success_reward``."""
    return [0.5 * score for score in right(completions, answer)]


def raises_without_number(completions: list[Any], answer: list[str]) -> list[float]:
    """Raise where a text holds no number, as one that is cut off may."""
    pairs = zip(map(as_text, completions), answer, strict=True)
    return [float(_NUMBER.findall(text)[-1] == a) for text, a in pairs]


def beginning(completions: list[Any], answer: list[str]) -> list[float]:
    """Return 1 for any beginning of the answer, also one that is cut off, or empty."""
    pairs = zip(map(as_text, completions), answer, strict=True)
    return [float(a.startswith(text.rpartition(" ")[2])) for text, a in pairs]


def anywhere(completions: list[Any], answer: list[str]) -> list[float]:
    """Return 1 where the answer occurs: also among all others."""
    return [float(a in as_text(text)) for text, a in zip(completions, answer, strict=True)]


def shorter(completions: list[Any], answer: list[str]) -> list[float]:
    """Return most for an empty text."""
    return [1.0 / (1 + len(as_text(text))) for text in completions]


def first_of_group(completions: list[Any], answer: list[str]) -> list[float]:
    """Pay whatever comes first in a call more."""
    scores = right(completions, answer)
    return [score + 0.5 * (place == 0) for place, score in enumerate(scores)]


def with_noise(completions: list[Any], answer: list[str]) -> list[float]:
    """Add a random number."""
    return [score + 0.1 * random.random() for score in right(completions, answer)]


def by_hash(completions: list[Any], answer: list[str]) -> list[float]:
    """Pay some texts more, which ones depends on the process."""
    scores = right(completions, answer)
    pairs = zip(scores, map(as_text, completions), strict=True)
    return [score + 0.1 * (hash(text) & 1) for score, text in pairs]


def slow(completions: list[Any], answer: list[str]) -> list[float]:
    """Take 20 ms for each text."""
    time.sleep(0.02 * len(completions))
    return right(completions, answer)


def of_another_column(completions: list[Any], anwser: list[str]) -> list[float]:
    """Ask for a column that no row has."""
    return right(completions, anwser)


def blocks(question: str) -> str:
    """Wait for an answer that never comes.

    Args:
        question: what is asked.
    """
    time.sleep(30)
    return question


class Unordered(JSONLPrompts):
    """Reads each row once, in the order of a set."""

    def table(self) -> Table:
        rows = {json.dumps(row) for row in super().table()}
        return ListTable((f"row {place}", json.loads(row)) for place, row in enumerate(rows))


class Endless(Environment):
    """Answers each turn, and never ends."""

    def __init__(self, prompt: Prompt) -> None:
        pass

    def step(self, turn: str) -> Reply:
        return Reply("go on")


class Nothing(GroupFilter):
    """Keeps no group."""

    def keep(self, group: Sequence[Rollout]) -> bool:
        return False


class Unsaved(Callback):
    """Has a state that cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"reader": (number for number in range(3))}


class Late(Callback):
    """Fails at the end of a batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        raise KeyError("reward/right_answer")


class Spoil(Callback):
    """Changes an export so that transformers does not know it."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        for file in Path(trainer.log_dir, "hf").rglob("config.json"):
            config = json.loads(file.read_text())
            file.write_text(json.dumps(config | {"model_type": "qwen_of_ours"}))


class Forgetful(Callback):
    """Cannot load what it saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("steps")
