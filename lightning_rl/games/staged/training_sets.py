"""Training sets of fine-tuning jobs: answers to imitate, or pairs of a better and a worse one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_rl.rollout import Message

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """A chat, and the answer to imitate."""

    messages: list[Message]
    answer: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A chat, a better answer and a worse one."""

    messages: list[Message]
    chosen: str
    rejected: str


class TrainingSet(ABC):
    """Rows of one kind, in the form that each back end needs."""

    method: ClassVar[str]
    """OpenAI's name of the method that learns from these rows."""
    module: ClassVar[str]
    """The ``LightningModule`` of this library for that method; ``data`` is its data module."""
    data: ClassVar[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def openai_rows(self) -> list[Record]:
        """Return the rows for a file of OpenAI's fine-tuning API."""

    @abstractmethod
    def local_rows(self) -> list[Record]:
        """Return the rows for a prompt file of this library's data modules."""


@dataclass(frozen=True)
class Demonstrations(TrainingSet):
    """Rows for supervised fine-tuning, which makes each example's answer more likely."""

    examples: Sequence[Example]
    method = "supervised"
    module, data = "SFTModule", "SFTDataModule"

    def __len__(self) -> int:
        return len(self.examples)

    def openai_rows(self) -> list[Record]:
        return [{"messages": [*row.messages, *_answer(row.answer)]} for row in self.examples]

    def local_rows(self) -> list[Record]:
        return [{"prompt": row.messages, "completion": row.answer} for row in self.examples]


@dataclass(frozen=True)
class Preferences(TrainingSet):
    """Rows for DPO, which prefers each pair's chosen answer over the rejected one."""

    pairs: Sequence[Pair]
    method = "dpo"
    module, data = "DPOModule", "PairDataModule"

    def __len__(self) -> int:
        return len(self.pairs)

    def openai_rows(self) -> list[Record]:
        return [
            {
                "input": {"messages": pair.messages},
                "preferred_output": _answer(pair.chosen),
                "non_preferred_output": _answer(pair.rejected),
            }
            for pair in self.pairs
        ]

    def local_rows(self) -> list[Record]:
        return [
            {"prompt": pair.messages, "chosen": pair.chosen, "rejected": pair.rejected}
            for pair in self.pairs
        ]


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]
