"""Servers with tools of their own, which ``ToolAgent`` offers to the model."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

ServedTool = tuple[dict[str, Any], Callable[..., Awaitable[Any]]]
"""An OpenAI-style JSON schema, and what calls the tool."""


class ToolServer(ABC):
    """A server whose tools check their arguments themselves."""

    @abstractmethod
    def tools(self) -> list[ServedTool]:
        """Connect, and return the tools."""

    @abstractmethod
    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool, and return its result; the model is told of errors that it raises."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect; the next call connects again."""

    def served(self, name: str, description: str | None, accepts: Mapping[str, Any]) -> ServedTool:
        """Return a tool of the server; ``accepts`` is the JSON schema of its arguments."""
        parameters = {"type": "object", "properties": {}} | dict(accepts)
        schema = {"name": name, "description": description or "", "parameters": parameters}
        return {"type": "function", "function": schema}, partial(self.__call__, name)
