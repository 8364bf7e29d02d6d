"""Rollouts as the viewer and previews show them: row by row, call by call, turn by turn."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_rl.data.rollouts.token_texts import mark_of, text_with_marks
from lightning_rl.rollout import Rollout

Record = dict[str, Any]
TAIL = 40
"""Number of tokens of a call's prompt that a preview shows."""
DECISIONS = ("rejects", "accepts", "goes on")


def rows_of(record: Record) -> list[Record]:
    """Return the rows of a recorded rollout; tokens before a branch's fork have no loss."""
    given = {"demonstration": record.get("demonstration")}
    rows = [given | row for row in record["rows"]]
    shared = [0] * len(rows)
    for call in (record.get("calls") or ())[: (record.get("fork") or {}).get("calls", 0)]:
        if 0 <= call["row"] < len(shared):  # a damaged record is to be seen, too
            shared[call["row"]] = max(shared[call["row"]], call["stop"])
    return [
        row | {"loss_mask": [False] * count + row["loss_mask"][count:]} if count else row
        for row, count in zip(rows, shared, strict=True)
    ]


def calls_as_text(rollout: Rollout, decode: Callable[[list[int]], str], tail: int = TAIL) -> str:
    """Return each call in order: row, role, reward, the end of its prompt, and the completion."""
    rows, lines = rollout.rows, []
    for number, call in enumerate(rollout.calls, 1):
        row = rows[call.row]
        prompt = rollout.prompt_of(call)
        begin = "…" if len(prompt) > tail else ""
        parts = [f"call {number}", f"row {call.row + 1}", row.role]
        parts += [] if call.reward is None else [f"reward {call.reward:g}"]
        parts += [] if call.scorable else ["not trained on"]
        wrote = decode(row.token_ids[call.start : call.stop])
        marks = [(at, mark_of(p.width, p.height)) for at, p in row.placed if at < len(prompt)]
        read = text_with_marks(decode, prompt, marks, tail)
        lines.append(f"[{', '.join(filter(None, parts))}] {begin}{read} → {wrote}")
    return "\n".join(lines)


def turns_of(completion: str | Sequence[Record]) -> list[Record]:
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


def _is_turn(message: Record) -> bool:
    """Return whether a message is a protocol's turn; damaged ones count as ordinary messages."""
    return (
        {"role", "content", "round", "channels", "decision"} <= message.keys()
        and isinstance(message["channels"], list | tuple)
        and isinstance(message["round"], int)
        and message["decision"] in (None, *range(len(DECISIONS)))
    )


def turns_as_text(turns: Sequence[Record]) -> str:
    """Return a line for each turn: round (from 1), agent, channels, text, and the decision."""
    lines = []
    for turn in turns:
        parts = [f"round {turn['round'] + 1}", turn["agent"], " + ".join(turn["channels"])]
        decided = "" if turn["decision"] is None else f" → {turn['decision']}"
        lines.append(f"[{', '.join(filter(None, parts))}] {turn['text']}{decided}")
    return "\n".join(lines)
