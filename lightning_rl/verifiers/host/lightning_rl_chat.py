"""A verifiers harness: a chat with the environment's tools, inside the worker's own process.

verifiers' own chat program starts an interpreter for every user turn, which costs a second of CPU
time. What matters is that each model call goes through the endpoint that verifiers watches.
"""

import asyncio
import contextlib
import functools
import json
import uuid
from typing import Any

import httpx
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat"]

_WAITS_S = (0.5, 2.0)
"""Seconds to wait before a request is sent again."""


class ChatConfig(HarnessConfig):
    """Has no settings besides the inherited ones."""


class Chat(Harness[ChatConfig]):
    """Asks the model, runs the tools it calls, and ends at an answer without calls."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        servers = {n: {"url": u, "timeout": self.config.tool_timeout} for n, u in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, names, connected = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                request = {"model": ctx.model, "messages": messages}
                if tools:
                    request["tools"] = tools
                response = await _ask(endpoint, secret, request)
                if response.status_code != 200:
                    return _refused(response)
                message = response.json()["choices"][0]["message"]
                messages.append({k: v for k, v in message.items() if v is not None})
                calls = message.get("tool_calls")
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content = await _call(connected, names, call["function"])
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


async def _ask(endpoint: str, secret: str, request: dict[str, Any]) -> httpx.Response:
    """Return the endpoint's response; after a broken connection, the same key gets the same answer.

    Raises:
        httpx.TransportError: if the connection breaks every time.
    """
    headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": uuid.uuid4().hex}
    url = f"{endpoint.rstrip('/')}/chat/completions"
    for seconds in _WAITS_S:
        try:
            return await _http().post(url, json=request, headers=headers)
        except httpx.TransportError:
            await asyncio.sleep(seconds)
    return await _http().post(url, json=request, headers=headers)


@functools.cache
def _http() -> httpx.AsyncClient:
    """Return the client of all rollouts; without certificates, as the endpoint is local."""
    return httpx.AsyncClient(verify=False, timeout=httpx.Timeout(None, connect=30.0))


def _refused(response: httpx.Response) -> ProgramResult:
    """Report a full context as a limit that was reached, and anything else as a failure."""
    full = response.status_code == 400 and "context_length_exceeded" in response.text
    return ProgramResult(exit_code=0 if full else 1, stdout="", stderr=response.text)


async def _call(servers: Any, names: Any, function: dict[str, Any]) -> Any:
    """Return the tool's answer; errors in the call are reported to the model."""
    name = function["name"]
    if name not in names:
        return f"error: unknown tool {name!r}; available: {', '.join(sorted(names)) or 'none'}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not valid JSON ({error})"
    if not isinstance(arguments, dict):
        return f"error: the arguments must be a JSON object, got {type(arguments).__name__}"
    return await call_mcp(servers, names, name, arguments)
