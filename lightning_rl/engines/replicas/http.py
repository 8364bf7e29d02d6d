"""A vLLM server as a replica: token ids in, token ids with logprobs and versions out, over HTTP."""

import asyncio
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.replicas.replica import (
    HEALTH_TIMEOUT_S,
    Replica,
    ReplicaLost,
    Timeouts,
    worker_error,
)
from lightning_rl.engines.replicas.server_access import CLAIM, RUN_HEADER, TAKEN
from lightning_rl.engines.replicas.server_process import ListeningServer
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.start_hints import with_hint
from lightning_rl.errors import (
    EngineError,
    ReplicaError,
    ServerRefusal,
    StaleWeightsError,
    SyncTimeoutError,
)
from lightning_rl.run.retry import WaitsForFile

_log = logging.getLogger(__name__)
_FIRST_NOTICE_S, _NEXT_NOTICE_S = 3.0, 15.0
"""Seconds before the first and between further notices that we wait for a foreign server."""
_UNKNOWN = (404, 405, 501)
"""Status codes for a path or method that a server does not know."""
_CLAIM_AGAIN_S = 1.0
"""Seconds between two attempts to claim a server that another run holds."""
_ENGINE_DIED = ("EngineCore encountered an issue", "EngineDeadError")
"""vLLM's error texts just before its server ends, too."""
_KEPT_S = 3.0
"""Seconds for which an idle connection is kept; vLLM closes it after five."""
_NO_LIMIT = aiohttp.ClientTimeout(total=None)
_CLOSED = (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError)
_CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)


class HTTPReplica(Replica):
    """A vLLM server with ``VLLM_SERVER_DEV_MODE=1`` and our worker extension.

    Only one run can use it at a time (:mod:`lightning_rl.engines.replicas.server_access`).

    Args:
        url: ``http://host:port``; for a server that we start, where it will listen.
        key: bearer token; empty: none.
        launch: starts the server; None: it runs already.
        apart: whether it keeps a LoRA unmerged.
        shortest: the minimum ``max_model_len`` that it must have.
        ends: tokens that end a turn, which its own model's files may lack.
        timeouts: its time limits.
        lease_s: how long this run keeps the server without a request to it.
        connections: completions that are asked for at the same time; further ones wait.
    """

    def __init__(
        self,
        url: str,
        key: str,
        launch: Callable[[], ListeningServer] | None,
        apart: bool,
        timeouts: Timeouts,
        shortest: int = 0,
        lease_s: float = 20.0,
        ends: Sequence[int] = (),
        connections: int = 256,
    ) -> None:
        super().__init__(url, urlsplit(url).hostname or "")
        self.can_restart = launch is not None
        self.max_length = 0
        self._run = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self._headers = {RUN_HEADER: self._run}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._launch = launch
        self._apart = apart
        self._timeouts = timeouts
        self._shortest = shortest
        self._lease_s = lease_s
        self._ends = list(ends)
        self._connections = connections
        self._process: ListeningServer | None = None
        self._session: aiohttp.ClientSession | None = None
        self._asking: aiohttp.ClientSession | None = None  # for completions

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        self.life += 1
        if self._session is None or self._asking is None:
            # One connection per call: a kept one that the server closes while it is used again
            # (after 5 idle seconds, or any error) would look like the server's death.
            once = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=once)
            kept = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_KEPT_S)
            self._asking = aiohttp.ClientSession(headers=self._headers, connector=kept)
        if self._launch is not None:
            if self._process is not None:
                await asyncio.to_thread(self._process.kill)
            self._process = self._launch()
            self.name = self._process.url
        await self._wait_until_ready()
        guarded = await self._claim()
        await self._read_properties()
        if not guarded:
            _log.warning(
                "%s does not prevent other runs from pushing their weights to it; start it with "
                "--middleware lightning_rl.engines.replicas.server_access.ServerAccess", self.name,
            )  # fmt: skip
        self.gone.clear()

    async def _wait_until_ready(self) -> None:
        """Wait until it answers; log a warning early, and repeatedly, if that takes long."""
        loop = asyncio.get_running_loop()
        begin, notice, why = loop.time(), _FIRST_NOTICE_S, "it has not been asked yet"
        try:
            async with asyncio.timeout(self._timeouts.start):
                while (problem := await self._health_problem()) is not None:
                    why = problem
                    if self._process is not None and not self._process.running:
                        raise ReplicaError(f"vLLM did not start: {_told(self._process.tail())}")
                    waited = loop.time() - begin
                    if self._launch is None and waited >= notice:
                        notice += _NEXT_NOTICE_S
                        _log.warning(
                            "no answer from %s for %.0f s (%s); is the server up, and the URL "
                            "right? Retrying until start_timeout_s=%g",
                            self.name, waited, why, self._timeouts.start,
                        )  # fmt: skip
                    await asyncio.sleep(0.25)
        except TimeoutError as error:
            reason = why if self._process is None else f"it printed: {self._process.tail()}"
            raise ReplicaError(
                f"{self.name} did not answer within start_timeout_s={self._timeouts.start:g}; "
                f"{reason}"
            ) from error

    async def _health_problem(self) -> str | None:
        """Return why it does not serve (yet); None if it does.

        Raises:
            ReplicaError: if a URL that we were given is not that of a vLLM server.
        """
        try:
            await self._call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except ServerRefusal as error:
            # 5xx: a proxy before a server that is still loading, or an engine that died.
            if self._launch is None and error.status < 500:
                raise ReplicaError(
                    f"{self.name} is not a vLLM server, or needs another key in api_key_env: "
                    f"{error}"
                ) from error
            return str(error)
        except EngineError as error:
            return str(error)
        return None

    async def _claim(self) -> bool:
        """Claim the server for this run; wait for another run that may just have been killed.

        Returns:
            whether the server supports claims.

        Raises:
            ReplicaError: if another run still uses it.
        """
        loop = asyncio.get_running_loop()
        begin, warned = loop.time(), False
        while True:
            try:
                await self._call("PUT", CLAIM, lease_s=str(self._lease_s))
                return True
            except ServerTaken as error:
                if loop.time() - begin > error.lease_s + _CLAIM_AGAIN_S:
                    raise
                if not warned:
                    warned = True
                    _log.warning(
                        "%s; waiting for %g s in case that run has ended", error, error.lease_s
                    )
            except ServerRefusal as error:
                if error.status not in _UNKNOWN:
                    raise
                return False
            await asyncio.sleep(_CLAIM_AGAIN_S)

    async def _read_properties(self) -> None:
        """Read the server's properties, and refuse one that we cannot work with."""
        try:
            models = await self._call("GET", "/v1/models")
            self.max_length = int(models["data"][0]["max_model_len"])
        except (ServerRefusal, LookupError, TypeError, ValueError) as error:
            raise ReplicaError(
                f"{self.name} is not a vLLM server: its /v1/models does not report a model's "
                f"max_model_len ({error})"
            ) from error
        if self.max_length < self._shortest:
            raise ReplicaError(
                f"{self.name} has a max_model_len of {self.max_length}, but the run's requests may "
                f"need {self._shortest}; start it with --max-model-len {self._shortest}"
            )
        try:
            world = await self._call("GET", "/get_world_size", include_dp="false")
        except EngineError as error:
            raise EngineError(
                f"{self.name} does not accept weights ({error}); start it as in docs/sync.md, with "
                "VLLM_SERVER_DEV_MODE=1, --worker-extension-cls and --weight-transfer-config"
            ) from error
        self.workers = int(world["world_size"])
        if self._apart:
            await self._call("POST", "/collective_rpc", {"method": "keep_adapters_apart"})

    async def answers(self) -> bool:
        if self._process is not None and not self._process.running:
            return False
        try:
            await self._call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except NoFileError:
            return True  # for all that we know
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        self.gone.set()
        if self._process is not None:
            await asyncio.to_thread(self._process.kill)
            self._process = None
        elif self._session is not None and self.life:
            with suppress(EngineError):  # it is gone, or another run's: then it is not ours to give
                await self._call("DELETE", CLAIM, timeout_s=HEALTH_TIMEOUT_S)
        # Taken off before it is closed: a push may be under way, whose next call is to find none.
        sessions, self._session, self._asking = (self._session, self._asking), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    # ---------------------------------------------------------------- generation

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        body = {
            "token_ids": list(token_ids),
            "priority": sampling.priority,
            "sampling_params": sampling.of_vllm(seed) | {"stop_token_ids": self._ends},
        }
        path, seconds = "/inference/v1/generate", self._timeouts.request
        try:
            answer = await self._call("POST", path, body, seconds, self._asking)
        except _KeptWasClosed:  # on a new connection the same seed gives the same completion
            answer = await self._call("POST", path, body, seconds)
        return completion_of(answer["choices"][0])

    async def pause(self) -> None:
        # Caches stay: what resets them is the end of a push, whoever paused.
        await self._call("POST", "/pause", mode="keep", clear_cache="false")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    # ---------------------------------------------------------------- weights

    async def transfer(self, step: str, timeout_s: float, **arguments: Any) -> Mapping[str, Any]:
        return await self._call("POST", f"/{step}", arguments, timeout_s=timeout_s)

    async def set_version(self, version: int, timeout_s: float) -> None:
        await self.transfer("finish_weight_update", timeout_s, weight_version=str(version))
        reset = await self._call("POST", "/reset_prefix_cache", reset_running_requests="true")
        if not reset["success"]:
            raise StaleWeightsError(f"{self.name} refused to reset its prefix cache after a push")
        answered = (await self._call("GET", "/weight_info"))["weight_version"]
        self._require_version(answered, version)

    async def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        call = {"method": "held_weights", "args": [list(names)]}
        answer = await self._call("POST", "/collective_rpc", call)
        return self._held_digests(answer["results"])

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        kept: aiohttp.ClientSession | None = None,
        **query: str,
    ) -> Any:
        session = kept or self._session
        if session is None:
            raise ReplicaLost(f"{self.name} is closed")
        seconds = self._timeouts.call if timeout_s is None else timeout_s
        waits = WaitsForFile()

        async def asked() -> Any:
            async with session.request(
                method, f"{self.name}{path}", json=body, params=query, timeout=_NO_LIMIT
            ) as response:
                text = await response.text()
                if response.status != 200:
                    raise refusal(self.name, path, response.status, text)
                return json.loads(text) if text else {}

        try:
            async with asyncio.timeout(seconds):
                return await waits.for_call(asked)
        except TimeoutError as error:
            if waits.waiting:
                raise NoFileError(
                    f"{self.name}{path} could not be asked for {seconds:g} s: too many open files; "
                    "raise the limit (ulimit -n)"
                ) from error
            raise SyncTimeoutError(
                f"{self.name}{path} did not answer within {seconds:g} s: it is stuck or too slow"
            ) from error
        except _CONNECTION_ERRORS as error:
            kind = _KeptWasClosed if kept and isinstance(error, _CLOSED) else ReplicaLost
            raise kind(f"{self.name}{path}: {error or type(error).__name__}") from error
        except (aiohttp.ClientError, ValueError) as error:
            why = getattr(error, "message", error)
            raise ServerRefusal(
                f"{self.name}{path} answered unlike a vLLM server ({why})", 0
            ) from error


class NoFileError(EngineError):
    """No connection could be opened, since too many files are open: a server is not to blame."""


class _KeptWasClosed(ReplicaLost):
    """A connection that was kept from an earlier request is closed, as the server may do."""


class ServerTaken(ReplicaError):
    """Another run holds the server, for ``lease_s`` seconds after each of its requests."""

    def __init__(self, message: str, lease_s: float) -> None:
        super().__init__(message)
        self.lease_s = lease_s

    def described(self) -> tuple[Any, ...]:
        return (str(self), self.lease_s)


def _told(tail: str) -> str:
    """Return the end of a server's output, with a hint at the likely cause."""
    if "unrecognized arguments" not in tail:
        return with_hint(tail)
    return (
        f"{tail}; unless this is caused by the engine's options, this vLLM is not the version that "
        "`lightning-rl doctor` names"
    )


def completion_of(choice: Mapping[str, Any]) -> Completion:
    """Return the completion in a choice of vLLM's token-in-token-out response.

    Raises:
        EngineError: if it lacks logprobs or weight versions.
    """
    token_ids = list(choice["token_ids"] or [])
    content = (choice["logprobs"] or {}).get("content") or []
    versions = [-1] * len(token_ids)
    spans = choice.get("weight_versions")
    for span in spans or []:
        versions[span["start"] : span["end"]] = [int(span["version"])] * (
            span["end"] - span["start"]
        )
    if len(content) != len(token_ids) or -1 in versions:
        raise EngineError(
            f"a vLLM server answered with {len(token_ids)} tokens, {len(content)} logprobs and "
            f"weight versions {spans}; it must run vLLM 0.32 or later, since older ones report no "
            "versions"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=[entry["logprob"] for entry in content],
        finish_reason=choice["finish_reason"] or "abort",
        versions=versions,
    )


def refusal(name: str, path: str, status: int, text: str) -> EngineError:
    """Return the error for a refusal, of the worker's class if that is one of ours.

    It is a :class:`ReplicaLost` if the engine behind the server has died, or the server has
    restarted and no run has claimed it.
    """
    if (error := worker_error(name, text)) is not None:
        return error
    if status == TAKEN and (taken := _taken(name, text)) is not None:
        return taken
    if status >= 500 and any(words in text for words in _ENGINE_DIED):
        return ReplicaLost(f"{name}{path}: its engine has died")
    return ServerRefusal(f"{name}{path} answered {status}: {text[:300]}", status)


def _taken(name: str, text: str) -> ReplicaError | None:
    try:
        answer = json.loads(text)
        run, lease_s = answer["run"], float(answer.get("lease_s", 0))
    except (ValueError, TypeError, KeyError):
        return None  # another server's 409
    if run is None:
        return ReplicaLost(f"{name} has been restarted, or no run has claimed it")
    return ServerTaken(
        f"{name} is used by another training run ({run}), whose weights this one's pushes would "
        "overwrite; give each run its own servers, or end that run",
        lease_s,
    )
