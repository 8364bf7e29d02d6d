"""The model client of a verifiers environment: sends each rollout's calls with its own key."""

import copy
from typing import Any

import verifiers.v1.clients.eval
from verifiers.v1.clients.eval import EvalClient

_keys: dict[str, str] = {}
"""Keys by the id of their trace, which verifiers passes to clients as ``session_id``."""


class PolicyClient(EvalClient):  # type: ignore[misc, unused-ignore]
    """One client, hence one connection pool, for all rollouts of a worker.

    verifiers would keep one for every key it has seen, until the worker ends.
    """

    async def get_response(self, *args: Any, session_id: str | None = None, **options: Any) -> Any:
        keyed = self._keyed(session_id)
        return await EvalClient.get_response(keyed, *args, session_id=session_id, **options)

    async def relay(self, *args: Any, session_id: str | None = None, **options: Any) -> Any:
        keyed = self._keyed(session_id)
        return await EvalClient.relay(keyed, *args, session_id=session_id, **options)

    def _keyed(self, session_id: str | None) -> Any:
        keyed = copy.copy(self)
        keyed.api_key = _keys.get(session_id or "", self.api_key)
        return keyed


def install() -> None:
    """Make verifiers use this client."""
    verifiers.v1.clients.eval.EvalClient = PolicyClient


class Keyring:
    """The key of one rollout, for all traces that it starts."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._traces: list[str] = []

    def add(self, trace: Any) -> None:
        self._traces.append(trace.id)
        _keys[trace.id] = self._key

    def clear(self) -> None:
        for trace in self._traces:
            _keys.pop(trace, None)
