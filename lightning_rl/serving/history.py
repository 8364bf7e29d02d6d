"""The messages of a session, and the exact tokens of the model's messages."""

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lightning_rl.rollout import Call, Message, Placed, Rollout
from lightning_rl.serving.chat_format import ChatFormat, Seen
from lightning_rl.serving.chats import RequestChat
from lightning_rl.serving.messages import Said


@dataclass(slots=True)
class _Node:
    """The end of a conversation; ``answers``: the calls that led here, by their formats' keys.

    ``message`` is the last message, and ``tool_calls`` the number of calls in all messages.
    """

    further: dict[str, "_Node"] = field(default_factory=dict)
    answers: dict[str, Call] = field(default_factory=dict)
    message: Message | None = None
    tool_calls: int = 0


class History:
    """The conversations of a session as a tree of messages.

    A chat that continues an answer keeps the exact tokens that were read and generated until then,
    from the rollout, followed by the new ones; any other chat is encoded as a whole.

    Args:
        rollout: holds the calls.
        prompt: messages already known, which are not part of the transcript.
    """

    def __init__(self, rollout: Rollout, prompt: RequestChat) -> None:
        self._rollout = rollout
        self._root = _Node()
        self._state = 0  # another once a node was taken out
        self.transcript: list[Message] = []
        """Every message that was said or sent, in the order of its first appearance."""
        self.note(prompt)
        self.transcript.clear()

    def prompt(self, chat: RequestChat, form: ChatFormat) -> Seen:
        """Return the tokens of a chat, with the opening of the model's turn, and its pictures.

        Raises:
            ConfigError: if the template cannot render it.
            PictureError: if the model does not read its pictures.
        """
        nodes = self._known(chat)[: len(chat.said) - 1]
        places = (p for p in reversed(range(len(nodes))) if form.key in nodes[p].answers)
        node = next(places, None)
        if node is None:
            return form.prompt(chat.said)
        call = nodes[node].answers[form.key]
        row = self._rollout.rows[call.row]
        wrote = row.token_ids[call.start : call.stop]
        added, further = form.suffix(wrote, chat.said[node].message, chat.said[node + 1 :])
        token_ids = [*row.prompt_ids, *islice(row.token_ids, call.stop)]
        end = len(token_ids)
        placed = [one for one in row.placed if one.start < end]
        placed += [Placed(end + start, picture) for start, picture in further]
        return token_ids + added, placed

    def note(self, chat: RequestChat) -> int:
        """Record a client's chat; return how many tool calls it holds."""
        nodes = self._known(chat)
        for item in chat.said[len(nodes) :]:
            nodes.append(self._after(nodes[-1] if nodes else self._root, item))
        chat.place = self._state, nodes
        return nodes[-1].tool_calls if nodes else 0

    def answer(self, chat: RequestChat, turn: Said, form: ChatFormat | None, call: Call) -> None:
        """Record an answer; equal answers keep the tokens of the last one."""
        self.note(chat)
        node = self._after(chat.place[1][-1], turn)
        if form is not None:
            node.answers[form.key] = call

    def take_back(self, chat: RequestChat, turn: Said) -> None:
        """Forget an answer that was not delivered, unless a chat continues an equal one."""
        self.note(chat)
        node = chat.place[1][-1]
        last = node.further.get(turn.key)
        if last is not None and not last.further:
            del node.further[turn.key]
            self._state += 1
            self.transcript[:] = [m for m in self.transcript if m is not last.message]

    def _known(self, chat: RequestChat) -> list[Any]:
        """Return the nodes of a chat's known messages."""
        state, nodes = chat.place
        nodes = nodes if state == self._state else []
        for item in chat.said[len(nodes) :]:
            last = nodes[-1] if nodes else self._root
            if item.key not in last.further:
                break
            nodes.append(last.further[item.key])
        return nodes

    def _after(self, node: _Node, item: Said) -> _Node:
        """Return the next node; a new message extends the tree and the transcript."""
        if item.key not in node.further:
            calls = node.tool_calls + len(item.message.get("tool_calls", ()))
            node.further[item.key] = _Node(message=item.message, tool_calls=calls)
            self.transcript.append(item.message)
        return node.further[item.key]
