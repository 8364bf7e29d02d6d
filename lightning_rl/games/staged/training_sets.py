"""What a fine-tune job learns from: answers to imitate, or pairs of a better and a worse one."""

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
    """Rows of one kind, in the form of each back end."""

    method: ClassVar[str]
    """OpenAI's word for how to learn from it."""
    module: ClassVar[str]
    """Our ``LightningModule`` that does so, and ``data`` what feeds it."""
    data: ClassVar[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def openai_rows(self) -> list[Record]:
        """Rows of the file that OpenAI's fine-tuning API takes."""

    @abstractmethod
    def local_rows(self) -> list[Record]:
        """Rows of a prompt file for our own data modules."""


@dataclass(frozen=True)
class Demonstrations(TrainingSet):
    """For supervised fine-tuning: each example's answer is made more likely."""

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
    """For DPO: the chosen answer of each pair is raised over the rejected one."""

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
