"""Chats in requests: each repeats the last one, so only new messages are read."""

import marshal
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.errors import PictureError
from lightning_rl.rollout import Message, Prompt
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.limits import RequestLimits
from lightning_rl.serving.messages import Said, read_message, seen, with_name
from lightning_rl.vision.messages import require_few, with_sources

_KEPT = 8
"""Number of a session's concurrent chats to remember."""
_AS_THEY_ARE = ("arguments", "input")
"""Fields whose objects templates get unchanged, so the order of their keys matters."""


@dataclass(slots=True)
class RequestChat:
    """The messages of a request.

    Args:
        said: the messages, in the form of templates.
        place: the state of the session's :class:`History`, and its nodes of the first messages;
            set by the history.
    """

    said: list[Said] = field(default_factory=list)
    place: tuple[int, list[Any]] = field(default_factory=lambda: (0, []))


@dataclass(frozen=True, slots=True)
class _Known:
    """Messages that a client sent, and the chat read from them.

    ``exactly`` has the places and exact bytes of messages for which Python's equality is too weak
    (``1 == True``).
    """

    given: list[Any]
    exactly: list[tuple[int, bytes]]
    chat: RequestChat

    def begins(self, given: list[Any]) -> bool:
        """Tell whether these messages begin with the known ones."""
        return given[: len(self.given)] == self.given and all(
            marshal.dumps(given[place], 0) == bits for place, bits in self.exactly
        )


class ChatReader:
    """Reads the chats of one session.

    Args:
        limits: limits of requests, with those of pictures.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._known: list[_Known] = []

    def read(
        self,
        given: list[Any],
        messages: Callable[[int, Any], Sequence[Message]] = lambda *sent: [read_message(*sent)],
    ) -> RequestChat:
        """Return the chat of a request. Results of tools get their tool's name.

        Args:
            given: the messages as sent, possibly invalid.
            messages: converts one of them, given its place, to messages in the form of templates.

        Raises:
            RequestError: if there are no messages, or ``messages`` raises it.
        """
        if not given:
            raise RequestError(
                "Invalid 'messages': empty array. Expected an array with minimum length 1, but got "
                "an empty array instead.",
                param="messages",
                code="empty_array",
            )
        fitting = [known for known in self._known if known.begins(given)]
        last = max(
            fitting, key=lambda known: len(known.given), default=_Known([], [], RequestChat())
        )
        state, nodes = last.chat.place  # at once: another request's may be noted meanwhile
        chat = RequestChat(list(last.chat.said), (state, list(nodes)))
        limits = self._limits
        try:
            for index in range(len(last.given), len(given)):
                for message in messages(index, given[index]):
                    named = with_name(message, chat.said)
                    chat.said.append(seen(named, limits.pictures, limits.picture_access))
            require_few(sum(len(item.pictures) for item in chat.said), limits.pictures)
        except PictureError as error:
            raise RequestError(str(error), param="messages", code="invalid_image") from error
        self._remember(last, given, chat)
        return chat

    def prompt(self, prompt: Prompt) -> RequestChat:
        """Return the chat of a rollout's prompt, with its pictures; empty for a text prompt."""
        if isinstance(prompt.prompt, str):
            return RequestChat()
        return self.read(with_sources(prompt.asked, prompt.pictures))

    def _remember(self, last: _Known, given: list[Any], chat: RequestChat) -> None:
        new = deepcopy(given[len(last.given) :])  # a client may change its own
        try:
            bits = [
                (index, marshal.dumps(message, 0))
                for index, message in enumerate(new, len(last.given))
                if not _told_by_equality(message)
            ]
        except ValueError:  # no JSON
            return
        known = _Known([*last.given, *new], [*last.exactly, *bits], chat)
        others = [other for other in self._known if other is not last]
        self._known = [known, *others][:_KEPT]


def _told_by_equality(value: Any) -> bool:
    """Tell whether any equal value is also rendered equally."""
    if isinstance(value, dict):
        return all(
            _told_by_equality(v) and not (k in _AS_THEY_ARE and isinstance(v, dict))
            for k, v in value.items()
        )
    if isinstance(value, list):
        return all(map(_told_by_equality, value))
    return value is None or type(value) is str
