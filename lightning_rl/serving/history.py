"""The messages of a session, and the exact tokens of the model's messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_rl.rollout import Message
from lightning_rl.serving.chat_format import ChatFormat
from lightning_rl.serving.messages import Said


@dataclass(slots=True)
class _Node:
    """The end of a conversation; ``tokens``: of the prompt and the completion that led here.

    They are kept by the key of the format that the chat was written in. ``message`` is the last.
    """

    further: dict[str, "_Node"] = field(default_factory=dict)
    tokens: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    message: Message | None = None


class History:
    """The conversations of a session as a tree of messages.

    A chat that continues an answer is written as the tokens that were read and generated until
    then, and what follows them; whatever else a client sends is encoded whole.

    Args:
        prompt: messages that are known already, and no part of the transcript.
    """

    def __init__(self, prompt: Sequence[Said] = ()) -> None:
        self._root = _Node()
        self.transcript: list[Message] = []
        """Every message that was said or sent, in the order of its first appearance."""
        self._walk(prompt)
        self.transcript.clear()

    def prompt(self, chat: Sequence[Said], form: ChatFormat) -> list[int]:
        """Token ids of a chat, with the opening of the model's turn.

        Raises:
            ConfigError: if the template cannot render it.
        """
        node, known = self._root, None
        for place, item in enumerate(chat[:-1]):
            following = node.further.get(item.key)
            if following is None:
                break
            node = following
            if form.key in node.tokens:
                known = place, node.tokens[form.key]
        if known is None:
            return form.prompt(chat)
        place, (read, wrote) = known
        return read + wrote + form.suffix(wrote, chat[place].message, chat[place + 1 :])

    def note(self, chat: Sequence[Said]) -> None:
        """Keep what a client sent."""
        self._walk(chat)

    def answer(
        self, chat: Sequence[Said], turn: Said, form: ChatFormat, read: list[int], wrote: list[int]
    ) -> None:
        """Keep the tokens of an answer; of answers that read alike, the last one's."""
        self._walk([*chat, turn]).tokens[form.key] = read, wrote

    def take_back(self, chat: Sequence[Said], turn: Said) -> None:
        """Forget an answer that was not delivered, unless a chat continues an equal one."""
        node = self._walk(chat)
        last = node.further.get(turn.key)
        if last is not None and not last.further:
            del node.further[turn.key]
            self.transcript[:] = [m for m in self.transcript if m is not last.message]

    def _walk(self, chat: Sequence[Said]) -> _Node:
        """The end of a chat; its new messages extend the tree and the transcript."""
        node = self._root
        for item in chat:
            if item.key not in node.further:
                node.further[item.key] = _Node(message=item.message)
                self.transcript.append(item.message)
            node = node.further[item.key]
        return node
