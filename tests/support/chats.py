"""Provide ways in which real chat templates write chats, and what is known of each."""

from dataclasses import dataclass, field
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Chats:
    """A tokenizer's chats under some variables of its template.

    Args:
        tokenizer: its name in ``tests.support.real_models``.
        ends: the texts of all tokens that end a turn; the last is the one that the template writes.
        begin: the token that stands before every prompt, if any.
        system: whether a chat may begin with a system message.
        wrote: two turns in a form that the template does not change, once it is over.
        variables: of the template.
        rewrites: what is said of it where it shows earlier turns otherwise than they were written.
        turns: so many turns, grown token by token, are the whole chat's as the template has it.
        tools: whether an agent can offer tools and read calls; else what it says instead.
        calls: how the template takes calls: with arguments as an ``object`` or ``text``, or not.
        thinking: whether the model thinks before it answers, where the template has a say in it.
    """

    tokenizer: str
    ends: tuple[str, ...]
    begin: str | None = None
    system: bool = True
    wrote: tuple[str, str] = ("Four.", "Five.")
    variables: dict[str, Any] = field(default_factory=dict)
    rewrites: str | None = None
    turns: int = 2
    tools: str | None = None
    calls: str | None = None
    thinking: str = ""


CHATS = {
    "smollm2": Chats("smollm2", ("<|im_end|>",), tools="the chat template"),
    "qwen3": Chats(
        "qwen3", ("<|im_end|>",), wrote=("Four.", EMPTY_THOUGHT + "Five."),
        rewrites="becomes 'Second.'", calls="object", thinking="on",
    ),
    "qwen3, not thinking": Chats(
        "qwen3", ("<|im_end|>",), variables={"enable_thinking": False}, turns=1,
        rewrites="what comes before a turn, '<think>", calls="object",
        tools="rewrites earlier turns", thinking="off",
    ),
    "llama3_1": Chats(
        "llama3_1", ("<|eot_id|>",), begin="<|begin_of_text|>", rewrites="becomes 'Padded.'",
        tools="does not render the model's tool calls",
    ),
    "gemma3": Chats(
        "gemma3", ("<end_of_turn>",), begin="<bos>", rewrites="becomes 'Padded.'",
        tools="roles must alternate",
    ),
    "deepseek_v3": Chats(
        "deepseek_v3", ("<｜end▁of▁sentence｜>",), begin="<｜begin▁of▁sentence｜>",
        tools="the chat template", calls="text",
    ),
    "mistral": Chats(
        "mistral", ("</s>",), begin="<s>", rewrites="a turn written as", system=False,
        tools="rewrites earlier turns", calls="object",
    ),
}  # fmt: skip
"""The chats by family; gpt-oss comes without a template."""
