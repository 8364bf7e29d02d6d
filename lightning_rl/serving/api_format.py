"""The interface of the supported APIs, and the common parts of OpenAI's."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_rl.rollout import Message
from lightning_rl.serving.ask import Answer, Ask, Terms, usage_of
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.fields import Fields, wrong_value
from lightning_rl.serving.limits import RequestLimits


class ApiFormat(ABC):
    """One kind of request: reads it, and writes its answers."""

    @abstractmethod
    def read(self, body: Any, terms: Terms) -> Ask:
        """Parse a request; called outside the event loop, because it may take long.

        Raises:
            RequestError: if the request is invalid or not supported.
        """

    @abstractmethod
    def write(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Message:
        """Return the answers as one object; ``number`` is its id, ``now`` in seconds."""

    @abstractmethod
    def stream(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Iterator[bytes]:
        """Yield the answers as server-sent events."""

    @abstractmethod
    def error(self, error: RequestError) -> Message:
        """Return the error as a client sees it."""


class OpenAIFormat(ApiFormat):
    """Writes errors in the format of OpenAI's API."""

    def error(self, error: RequestError) -> Message:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": error.message,
                "type": kind,
                "param": error.param,
                "code": error.code,
            }
        }


class ChoicesFormat(OpenAIFormat):
    """Writes answers as choices, with the events and usage of both kinds of completions."""

    prefix: str
    """Prefix of the ids of answers."""
    whole: str
    """The ``object`` field of an answer."""
    part: str
    """The ``object`` field of a chunk of a stream."""

    def write(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Message:
        return {
            "id": f"{self.prefix}-{number}",
            "object": self.whole,
            "created": now,
            "model": ask.model,
            "choices": [self.choice(index, ask, answer) for index, answer in enumerate(answers)],
            "usage": openai_usage(answers),
        }

    def stream(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Iterator[bytes]:
        head = {
            "id": f"{self.prefix}-{number}",
            "object": self.part,
            "created": now,
            "model": ask.model,
        }
        for index, answer in enumerate(answers):
            for choice in self.chunks(index, ask, answer):
                yield _event({**head, "choices": [choice]})
        if ask.usage:
            yield _event({**head, "choices": [], "usage": openai_usage(answers)})
        yield b"data: [DONE]\n\n"

    @abstractmethod
    def choice(self, index: int, ask: Ask, answer: Answer) -> Message:
        """Return one answer as a choice."""

    @abstractmethod
    def chunks(self, index: int, ask: Ask, answer: Answer) -> Iterator[Message]:
        """Yield one answer in parts."""


def read_wanted(fields: Fields) -> dict[str, Any]:
    """Read the wanted form of an answer; each format reads its own field for logprobs."""
    stream = fields.get("stream", bool) or False
    options = Fields(fields.get("stream_options", dict) or {}, "stream_options.")
    return {
        "stream": stream,
        "usage": not stream or bool(options.get("include_usage", bool)),
        "token_ids": fields.get("return_token_ids", bool) or False,
    }


def read_count(fields: Fields, limits: RequestLimits, prompts: int = 1) -> int:
    """Read ``n``, the number of answers to each prompt."""
    count = fields.get("n", int)
    count = 1 if count is None else count
    if not 1 <= count <= limits.max_answers:
        raise wrong_value("n", count, f"1 to {limits.max_answers} (limits.max_answers)")
    if count * prompts > limits.max_answers:
        raise RequestError(
            f"n={count} for {prompts} prompts asks for {count * prompts} completions; this server "
            f"gives {limits.max_answers} at most. Send several requests, or raise "
            "limits.max_answers",
            param="n",
            code="too_many",
        )
    return count


def pieces(text: str) -> Iterator[str]:
    """Yield a text in parts of 32 characters."""
    return (text[start : start + 32] for start in range(0, len(text), 32))


def token_ids_of(answer: Answer) -> Message:
    """Return the answer's tokens, under vLLM's names."""
    return {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.completion.token_ids}


def openai_usage(answers: Sequence[Answer]) -> dict[str, int]:
    read, wrote = usage_of(answers)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def typed_event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event with its type, as in Anthropic's API and OpenAI's responses."""
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


def _event(data: Message) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
