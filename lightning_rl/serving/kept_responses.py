"""The responses of a session, for requests that continue one by its id."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.rollout import Message
from lightning_rl.serving.errors import RequestError


@dataclass(slots=True)
class KeptResponses:
    """What the ids of one session's responses, and of the items in them, stand for."""

    _chats: dict[str, list[Message]] = field(default_factory=dict)
    _items: dict[str, Message] = field(default_factory=dict)

    def keep(self, name: str, chat: list[Message], items: Sequence[Message]) -> None:
        """Record a response: the chat that ends with it, without instructions, and its items."""
        self._chats[name] = chat
        self._items.update((item["id"], item) for item in items)

    def chat(self, name: str) -> list[Message]:
        """Return the chat that ends with a response.

        Raises:
            RequestError: if this session gave no response with this id.
        """
        if name not in self._chats:
            raise RequestError(
                f"Previous response with id '{name:.80}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._chats[name]

    def item(self, name: str) -> dict[str, Any]:
        """Return an item of a response.

        Raises:
            RequestError: if no response of this session has an item with this id.
        """
        if name not in self._items:
            raise RequestError(f"Item with id '{name:.80}' not found.", param="input", status=404)
        return self._items[name]
