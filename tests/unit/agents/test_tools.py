"""Tools: schemas from functions, calls that may go wrong in any way, parsers of call formats."""

import asyncio
import os
import sys
import threading
from typing import Literal

import pytest

from lightning_rl.agents.templates import HermesParser, ParsedCall
from lightning_rl.agents.tools import Toolbox, tool_schema
from lightning_rl.collect.stats import tool_metrics
from lightning_rl.errors import ConfigError
from tests.support.agents import tool_calls


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def pick(colour: Literal["red", "blue"], names: list[str] | None = None) -> dict:
    """Pick a colour.

    Args:
        colour: which.
        names: for whom.
    """
    return {"colour": colour, "names": names}


def answer(functions, *asked, timeout=5.0):
    """Return replies to calls given as (name, arguments)."""
    return asyncio.run(Toolbox(functions, timeout).answer(tool_calls(asked)))


# ---------------------------------------------------------------- schemas


def test_a_schema_is_openais():
    assert tool_schema(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first."},
                    "b": {"type": "integer", "description": "the second."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }


def no_docstring(a: int) -> int:
    return a


def no_type(a) -> int:
    """Take one.

    Args:
        a: it.
    """
    return a


def argument_not_described(a: int, b: int) -> int:
    """Take two.

    Args:
        a: the first.
    """
    return a + b


@pytest.mark.parametrize("function", [no_docstring, no_type, argument_not_described])
def test_a_function_that_says_too_little_is_no_tool(function):
    with pytest.raises(ConfigError, match=r"cannot be a tool: .* type hint for every argument"):
        tool_schema(function)


def test_a_toolbox_refuses_what_it_cannot_tell_apart():
    with pytest.raises(ConfigError, match=r"tools=\[\]"):
        Toolbox([], 1.0)
    with pytest.raises(ConfigError, match="two tools share the name 'add'"):
        Toolbox([add, add], 1.0)
    with pytest.raises(ConfigError, match="call_timeout=0 must be > 0"):
        Toolbox([add], 0)


# ---------------------------------------------------------------- calls


async def half(fails: bool) -> dict:
    """Say half of a character.

    Args:
        fails: whether to fail with it.
    """
    if fails:
        raise ValueError("b\ud83d")
    return {"said": ["a\ud83d"]}


def test_halves_of_characters_are_replaced():
    said, failed = answer([half], ("half", {"fails": False}), ("half", {"fails": True}))
    assert said["content"] == '{"said": ["a\ufffd"]}'
    assert failed["content"] == "Error: ValueError: b\ufffd"


def test_results_come_in_the_order_of_the_calls():
    replies = answer([add, pick], ("add", {"a": 2, "b": 3}), ("pick", {"colour": "red"}))
    assert replies == [
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "5"},
        {
            "role": "tool",
            "tool_call_id": "call00001",
            "name": "pick",
            "content": '{"colour": "red", "names": null}',
            "result": {"colour": "red", "names": None},
        },
    ]


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        (("subtract", {}), "unknown_tool", "there is no tool 'subtract'; there are: add, pick"),
        (("add", {}), "arguments", "a: Missing required argument"),
        (("add", {"a": 1, "c": 2}), "arguments", "c: Unexpected keyword argument"),
        (("add", {"a": "one"}), "arguments", "a: Input should be a valid integer"),
        (("add", [1, 2]), "arguments", "the arguments must be a JSON object"),
        (("pick", {"colour": "green"}), "arguments", "colour: Input should be 'red' or 'blue'"),
        (("pick", {"colour": "red", "names": [1]}), "arguments", "names.0: Input should be"),
    ],
)
def test_a_wrong_call_is_told_to_the_model(asked, kind, text):
    (reply,) = answer([add, pick], asked)
    assert reply["error"] == kind
    assert reply["content"].startswith("Error: ")
    assert text in reply["content"]
    assert reply["tool_call_id"] == "call00000"


def fail(how: str) -> str:
    """Fail.

    Args:
        how: in which way.
    """
    if how == "exit":
        sys.exit(3)
    if how == "end":
        os._exit(0)
    if how == "stop":
        raise StopIteration
    if how == "timeout":
        raise TimeoutError("of its own")
    if how == "return":
        return {1, 2}  # no JSON
    raise KeyError(how)


async def fail_too(how: str) -> str:
    """Fail on the event loop.

    Args:
        how: in which way.
    """
    return fail(how)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "KeyError: 'raise'"),
        ("stop", "StopIteration"),
        ("exit", "SystemExit: 3"),
        ("end", "EndsProcess: os._exit(0)"),
        ("timeout", "TimeoutError: of its own"),
        ("return", "not JSON serializable"),
    ],
)
def test_a_tool_may_fail_in_any_way(how, text):
    asked = ("fail", {"how": how}), ("fail_too", {"how": how}), ("add", {"a": 1})
    *broken, fine = answer([fail, fail_too, add], *asked)
    assert [reply["error"] for reply in broken] == ["exception"] * 2
    assert all(text in reply["content"] for reply in broken)
    assert fine["content"] == "1"


def test_tools_that_hang_hold_nobody_up():
    released = threading.Event()
    cancelled = []

    def hang() -> str:
        """Wait in a thread."""
        released.wait(60)
        return "too late"

    async def sleep() -> str:
        """Wait on the loop."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "too late"

    replies = answer(
        [hang, sleep, add], ("hang", {}), ("sleep", {}), ("add", {"a": 1}), timeout=1.0
    )
    assert [reply.get("error") for reply in replies] == ["timeout", "timeout", None]
    assert "hang took longer than 1 s" in replies[0]["content"]
    assert cancelled == [True]
    released.set()  # what comes late, after the loop is closed, disturbs nobody


def test_plain_tools_run_side_by_side_and_not_on_the_loop():
    meeting = threading.Barrier(2, timeout=30)  # breaks unless two calls are there at once

    def meet() -> bool:
        """Wait for the other call."""
        meeting.wait()
        return threading.current_thread() is threading.main_thread()

    replies = answer([meet], ("meet", {}), ("meet", {}), timeout=30)
    assert [reply["content"] for reply in replies] == ["false", "false"]


def test_calls_and_errors_are_counted(make_rollout):
    def rollout(*kinds):
        replies = [{"role": "tool", "content": ""} | ({"error": k} if k else {}) for k in kinds]
        return make_rollout([2], [3], completion=[{"role": "assistant", "content": ""}, *replies])

    assert tool_metrics([rollout(None, "timeout"), rollout("arguments", None), rollout()]) == {
        "tool/calls_mean": pytest.approx(4 / 3),
        "tool/error_share": 0.5,
        "tool/error_timeout": 0.25,
        "tool/error_arguments": 0.25,
    }
    assert tool_metrics([make_rollout([2], [3], completion="text")]) == {}


# ---------------------------------------------------------------- parsers


def hermes(*texts):
    return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts)


def test_hermes_calls_and_the_text_beside_them():
    text = "Let me see.\n" + hermes('{"name": "add", "arguments": {"a": 1}}', '{"name": "now"}')
    assert HermesParser().parse(text) == (
        "Let me see.",
        [ParsedCall("add", {"a": 1}), ParsedCall("now", {})],
    )
    assert HermesParser().parse(" plain ") == (" plain ", [])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (hermes('{"name": add}'), "not valid JSON"),
        (hermes("[1]"), 'must be {"name": ..., "arguments": {...}}'),
        (hermes('{"name": 3}'), 'must be {"name": ..., "arguments": {...}}'),
        (hermes("[" * 100_000), "not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "not closed by </tool_call>"),
    ],
)
def test_what_is_no_hermes_call_has_its_reason(text, error):
    _, (call,) = HermesParser().parse(text)
    assert error in call.error
