"""Interactions between agents, as the viewer and previews show them: turn by turn."""

from collections.abc import Sequence
from typing import Any

Turn = dict[str, Any]
DECISIONS = ("rejects", "accepts", "goes on")


def turns_of(completion: str | Sequence[Turn]) -> list[Turn]:
    """Return the turns of a :class:`ProtocolAgent`'s rollout, each with its decision as a word.

    Returns [] for any other rollout, whose messages have no channels.
    """
    if isinstance(completion, str) or not all(map(_is_turn, completion)):
        return []
    return [
        {
            "agent": message["role"],
            "text": message["content"],
            "round": message["round"],
            "channels": list(message["channels"]),
            "decision": None if message["decision"] is None else DECISIONS[message["decision"]],
        }
        for message in completion
    ]


def _is_turn(message: Turn) -> bool:
    """Return whether a message is a protocol's turn; damaged ones count as ordinary messages."""
    return (
        {"role", "content", "round", "channels", "decision"} <= message.keys()
        and isinstance(message["channels"], list | tuple)
        and isinstance(message["round"], int)
        and message["decision"] in (None, *range(len(DECISIONS)))
    )


def turns_as_text(turns: Sequence[Turn]) -> str:
    """Return a line for each turn: round (from 1), agent, channels, text, and the decision."""
    lines = []
    for turn in turns:
        place = [f"round {turn['round'] + 1}", turn["agent"], " + ".join(turn["channels"])]
        decided = "" if turn["decision"] is None else f" → {turn['decision']}"
        lines.append(f"[{', '.join(filter(None, place))}] {turn['text']}{decided}")
    return "\n".join(lines)
