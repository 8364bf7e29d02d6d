"""Calls each tool once, as a model would: a random model never writes a call that can be read."""

from collections.abc import Iterator
from typing import Any

from lightning_rl.agents.tools import Toolbox
from lightning_rl.cli.rehearse.findings import Kind, RunFinding
from lightning_rl.run.loop.background import run_async

_EXAMPLES = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


def try_tools(toolbox: Toolbox) -> Iterator[RunFinding]:
    """Yield what a call of each tool shows: that it answers, fails, or blocks.

    Arguments are examples of the types of its schema, so a tool may well refuse them.
    """
    for schema in toolbox.schemas:
        name = schema["function"]["name"]
        call = {"id": "0", "function": {"name": name, "arguments": _arguments(schema)}}
        [answer] = run_async(toolbox.answer([call]))
        error = answer.get("error")
        if error == "timeout":
            yield RunFinding(
                Kind.FAILS,
                "data.agent.tools",
                f"{name} did not return within call_timeout={toolbox.call_timeout:g} s; every call "
                "would take as long, and keep a thread",
            )
        else:
            what = "answers" if error is None else f"answers with an error ({error})"
            yield RunFinding(Kind.TRIED, "data.agent.tools", f"{name} {what}")


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    parameters = schema["function"].get("parameters", {})
    required = parameters.get("required", [])
    kinds = {name: parameters["properties"][name] for name in required}
    return {name: _example(kind) for name, kind in kinds.items()}


def _example(kind: dict[str, Any]) -> Any:
    if kind.get("enum"):
        return kind["enum"][0]
    return _EXAMPLES.get(str(kind.get("type")), "1")
