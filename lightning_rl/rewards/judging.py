"""Judge: what all rewards share that ask a language model about completions."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.calling import SHARED, RewardFailure, Score, Usage
from lightning_rl.rewards.judge_models import JudgeError, JudgeModel
from lightning_rl.rewards.log import RewardLog
from lightning_rl.rewards.remote import RemoteCalls
from lightning_rl.rewards.verdicts import Form
from lightning_rl.rollout import Message, answer_in

T = TypeVar("T")
Shown = dict[str, Any]
"""What a question may show of a completion: ``prompt``, ``completion`` and the row's columns.

The completion is without the thought of its last message; None: it was cut off in its thought.
"""


class Question:
    """A question with names in braces, to be replaced by texts; ``{{`` is a brace.

    Args:
        text: the question.
        needed: names that it has to show.

    Raises:
        ConfigError: for a malformed question, or one that does not show what it must.
    """

    def __init__(self, text: str, needed: Sequence[str]) -> None:
        self.text = text
        try:
            self.fields = {name for _, name, _, _ in Formatter().parse(text) if name}
            text.format(**dict.fromkeys(self.fields, ""))
        except (ValueError, LookupError, AttributeError) as error:
            raise ConfigError(f"the judge's question is malformed: {error}") from error
        if lacking := [name for name in needed if name not in self.fields]:
            raise ConfigError(f"the judge's question must show {{{lacking[0]}}}")

    def filled(self, shown: Mapping[str, Any]) -> str:
        """Return the question about a completion.

        Raises:
            JudgeError: if it names a column that is not there.
        """
        if missing := self.fields - shown.keys():
            raise JudgeError(
                f"the judge's question names {sorted(missing)}, but the prompts have no such "
                "columns; add them to the data, or correct the question"
            )
        return self.text.format(**{name: as_text(shown[name]) for name in self.fields})


class Judge(RemoteCalls, ABC):
    """A reward between 0 and 1 that asks a model; :meth:`grade` decides what.

    A request that fails is repeated, with limits on time and attempts. Without a usable answer a
    completion is FAILED with the reason, never scored 0.

    Args:
        judge: the model to ask.
        question: what it is asked.
        name: name under which the reward is logged.
        options: arguments of :class:`RemoteCalls`.
    """

    score_range = (0.0, 1.0)

    def __init__(self, judge: JudgeModel, question: Question, name: str, **options: Any) -> None:
        super().__init__(**options)
        self.judge = judge
        self.question = question
        self.__name__ = name

    def usage(
        self, tokenizer: PreTrainedTokenizerBase, prompt: float, completion: float, size: int
    ) -> Usage:
        return self.usage_of(size, len(tokenizer.encode(self.question.text)) + prompt + completion)

    def usage_of(self, requests: float, read: float) -> Usage:
        """Return what some requests use, each of which reads so many tokens."""
        if self.judge.max_tokens is None:
            return Usage(requests)
        return Usage(requests, requests * read, requests * self.judge.max_tokens)

    @abstractmethod
    async def grade(self, group: Sequence[Shown], log: RewardLog) -> list[Score]:
        """Return a score for each completion of a group; ``log`` has one value per completion."""

    async def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: Any
    ) -> list[Score]:
        self.judge.start()
        opened = columns.get("opened_thoughts", [False] * len(completions))
        lists = {name: values for name, values in columns.items() if name not in SHARED}
        group = [
            {
                "prompt": prompts[i],
                "completion": _without_thought(completions[i], opened[i]),
                **{name: values[i] for name, values in lists.items()},
            }
            for i in range(len(completions))
        ]
        return await self.grade(group, RewardLog.of(columns) or RewardLog(len(group)))

    async def asked(
        self, shown: Shown, read: Callable[[str], T], schema: dict[str, Any] | None = None
    ) -> T | RewardFailure:
        """Return what ``read`` makes of the judge's answer to the question, or why it cannot.

        ``read`` raises :class:`JudgeError` for an answer that cannot be used. With a ``schema`` the
        answer should be a JSON object.
        """

        async def attempt() -> T | RewardFailure:
            try:
                question = self.question.filled(shown)
                if schema is None:
                    return read(await self.judge.ask(question))
                return read(await self.judge.ask_for_json(question, schema))
            except JudgeError as error:
                return RewardFailure(str(error))

        return await self.limited(attempt)

    async def filled_in(self, shown: Shown, form: Form) -> list[int] | RewardFailure:
        """Return the numbers with which the judge fills in a form that the question shows."""
        return await self.asked(shown | {"form": form.example}, form.read, form.schema)

    def close(self) -> None:
        """Close the judge."""
        self.judge.close()


def _without_thought(completion: Any, opened: bool) -> Any:
    """Return a completion as a judge sees it; None if it was cut off in its thought."""
    answer = answer_in(completion, opened)
    if answer is None or isinstance(completion, str):
        return answer
    *before, last = completion  # only the last message has a thought
    return [*before, last | {"content": answer}]


def as_text(value: Any) -> str:
    """Return text unchanged, a single chat message as its content, a longer chat with roles."""
    if not isinstance(value, list) or not all(_is_message(item) for item in value):
        return str(value)
    if len(value) == 1 and "tool_calls" not in value[0]:
        return str(value[0]["content"])
    return "\n\n".join(f"{message['role']}: {_content(message)}" for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= {"role", "content"}


def _content(message: Message) -> str:
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([*filter(None, [str(message["content"])]), *calls])
