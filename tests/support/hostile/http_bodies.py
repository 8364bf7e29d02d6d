"""Provide hostile bodies: what stands in a request's JSON, and how much of it."""

import json
from typing import Any

from lightning_rl.serving import RequestLimits
from tests.support.hostile.call import Call
from tests.support.hostile.http_desk import CHAT, CLAUDE, GOOD, TEXT, Desk, Said, http_call

HERE = '"HERE"'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PROMPT = {"prompt": "2 + 3 =", "max_tokens": 2}
MESSAGE = {**GOOD, "model": "policy"}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ALLOWED = RequestLimits(client_templates=True, max_seconds=30, max_bytes=2**20)
"""The limit is so long that a busy machine refuses for the reason that is asked for."""
SHORT = RequestLimits(client_templates=True, max_seconds=3, max_bytes=2**20)


def posted(body: Any, path: str = CHAT, hostile: str = "") -> Said:
    """Say this body, in which ``HERE`` becomes a text that no Python value could give."""
    text = body if isinstance(body, str | bytes) else json.dumps(body).replace(HERE, hostile)

    async def say(desk: Desk) -> str:
        return await desk.post(text, path)

    return say


def chat(hostile: str = "", **fields: Any) -> Said:
    """Return a chat with these fields."""
    return posted({**GOOD, **fields}, CHAT, hostile)


def content(value: Any, hostile: str = "") -> Said:
    """Return a chat whose only message has this content."""
    return chat(hostile, messages=[{"role": "user", "content": value}])


def history(arguments: str) -> list[dict[str, Any]]:
    """Return a chat in which a tool was called with these arguments."""
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]


INVALID = "400", "not valid JSON"
CALLS: list[Call] = [
    http_call("no body", posted(b""), *INVALID),
    http_call("half of an object", posted(b'{"messages": ['), *INVALID),
    http_call("bytes that are no UTF-8", posted(b'{"model": "\xff"}'), *INVALID),
    http_call("an array in place of a request", posted(b"[]"), "400", "expected an object"),
    http_call("100,000 open brackets", posted(b"[" * 100_000), *INVALID, "more than 64 levels"),
    http_call("900 closed brackets in a field", chat("[" * 900 + "]" * 900, user="HERE"), *INVALID),
    http_call("temperature 1e400", chat("1e400", temperature="HERE"), *INVALID, "beyond float64"),
    http_call("temperature NaN", chat("NaN", temperature="HERE"), *INVALID, "NaN is not valid"),
    http_call("top_p of 400 digits", chat("1" * 400, top_p="HERE"), *INVALID, "beyond float64"),
    http_call("n of 5,000 digits", chat("1" * 5000, n="HERE"), *INVALID, "beyond float64"),
    http_call("max_tokens of 30 digits", chat(max_tokens=10**30), "400", "64 bits"),
    http_call("max_tokens 2**62", chat(max_tokens=2**62), "200", right=True),
    http_call("top_k 2**62", chat(top_k=2**62), "200", right=True),
    http_call("temperature 1e-300", chat(temperature=1e-300), "400", ">= 0.01"),
    http_call("half a surrogate pair", content("HERE", '"\\ud800"'), *INVALID, "surrogate"),
    http_call("the same in a key", chat('{"\\udfff": 1}', metadata="HERE"), *INVALID, "surrogate"),
    http_call("a null character", content("\0"), "200", right=True),
    http_call("a model of a megabyte", chat(model="x" * 2**20), "404", "does not exist"),
    http_call("a model that is an object", chat(model={}), "400", "Invalid type for 'model'"),
    http_call("10,000 strings that end", chat(stop=["x"] * 10_000), "400", "up to 64 strings"),
    http_call("an empty string that ends", chat(stop=""), "400", "1 to 1000 characters"),
    http_call("images", content([{"type": "image_url"}]), "400", "no picture"),
    http_call("messages that are numbers", chat(messages=[1, 2]), "400", "messages[0]"),
    http_call("an unknown role", chat(messages=[{"role": "god"}]), "400", "'system'"),
    http_call("a tool without a name", chat(tools=[{"type": "function"}]), "400", "tools[0]"),
    http_call(
        "parameters of a tool that are a number",
        chat(tools=[{"type": "function", "function": {"name": "a", "parameters": 3}}]),
        *("400", "tools[0].function.parameters"),
    ),
    http_call(
        "a choice of a tool of a megabyte",
        chat(tools=[TOOL], tool_choice={"function": {"name": "x" * 2**20}}),
        *("400", "not found in 'tools'"),
    ),
    http_call("a form", chat(response_format={"type": "json_object"}), "400", "VLLMLocal"),
    http_call("arguments that hold NaN", chat(messages=history('{"a": NaN}')), "200", right=True),
    http_call("arguments 9,000 deep", chat(messages=history("[" * 9000)), "200", right=True),
    http_call("arguments with half a pair", chat(messages=history('"\\ud800"')), "200", right=True),
    http_call("a history of 20,000 turns", chat(messages=GOOD["messages"] * 20_000), "400", "1024"),
    http_call("a message of 3 megabytes", content("2 + 3 " * 500_000), "400", "1024 tokens"),
    http_call("a body of 9 megabytes", content("x" * 9 * 2**20), "413", "limits.max_bytes"),
    http_call("the same to Anthropic's", posted(b"x" * 2**23 + b"x", CLAUDE), "413", "too_large"),
    http_call("n 129", chat(n=129), "400", "limits.max_answers"),
    http_call("n 0", chat(n=0), "400", "1 to 128"),
    http_call(
        "128 answers to 50 prompts",
        posted({"prompt": ["2"] * 50, "n": 128}, TEXT),
        *("400", "asks for 6400 completions", "limits.max_answers"),
    ),
    http_call("no prompts", posted({"prompt": []}, TEXT), "400", "token ids"),
    http_call("tokens that are none", posted({"prompt": [-1, 2**70]}, TEXT), "400", "ids below"),
    http_call("a prompt that is an object", posted({"prompt": {}}, TEXT), "400", "'prompt'"),
    http_call("echo of 400 digits", posted({**PROMPT, "echo": 10**299}, TEXT), "400", "echo=1000"),
    http_call(
        "Anthropic's without max_tokens",
        posted({"model": "policy", "messages": GOOD["messages"]}, CLAUDE),
        *("400", "invalid_request_error", "max_tokens"),
    ),
    http_call(
        "Anthropic's with a system prompt of NaN",
        posted({**MESSAGE, "system": "HERE"}, CLAUDE, "NaN"),
        *("400", '"type": "error"', "NaN is not valid"),
    ),
    http_call(
        "Anthropic's with a tool that has no schema",
        posted({**MESSAGE, "tools": [{"name": "a"}]}, CLAUDE),
        *("400", "tools.0.input_schema"),
    ),
    http_call("a chat template", chat(chat_template=ENDLESS), "400", "limits.client_templates"),
    http_call(
        "a chat template among the variables",
        chat(chat_template_kwargs={"chat_template": ENDLESS}),
        *("400", "chat_template_kwargs.chat_template"),
    ),
    http_call(
        "a variable that is an argument of the renderer",
        chat(chat_template_kwargs={"tokenize": True}),
        *("400", "set by the server"),
    ),
    http_call(
        "an endless chat template, where allowed",
        chat(chat_template=ENDLESS),
        *("400", "more than 3 s"),
        limits=SHORT,
    ),
    http_call(
        "a chat template that fills the memory, where allowed",
        chat(chat_template="{{ 'x' * 99999999999 }}"),
        *("400", "MemoryError"),
        limits=ALLOWED,
    ),
    http_call(
        "a chat template that writes 100 megabytes, where allowed",
        chat(chat_template="{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"),
        *("400", "more than 1048576 bytes"),
        limits=ALLOWED,
    ),
    http_call(
        "a chat template that reaches for Python, where allowed",
        chat(chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        *("400", "SecurityError"),
        limits=ALLOWED,
    ),
]
