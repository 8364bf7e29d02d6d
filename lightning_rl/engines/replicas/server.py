"""VLLMServer: vLLM in separate processes, over HTTP."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.replicas.http import HTTPReplica
from lightning_rl.engines.replicas.replica import Replica
from lightning_rl.engines.replicas.replicated import OUR_TRANSFER, ReplicatedEngine
from lightning_rl.engines.replicas.server_list import ServerList, follow, read_urls, require_url
from lightning_rl.engines.replicas.server_process import ListeningServer
from lightning_rl.engines.vllm.settings import VLLMEngine
from lightning_rl.errors import ConfigError, EngineError, require_at_least
from lightning_rl.models.generation_config import written_ends
from lightning_rl.run.processes.machine import raise_file_limit

_WORKER = "lightning_rl.sync.vllm_worker"
_LEASE = 4
"""Health checks that a run may miss before another run can claim the server."""
_MOST_CONNECTIONS = 4096
"""Completions that one server is asked for at a time; it writes far fewer."""
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
SERVER_ARGUMENTS = {
    "worker_extension_cls": f"{_WORKER}.WorkerExtension",
    "weight_transfer_config": {"backend": OUR_TRANSFER},
    "middleware": "lightning_rl.engines.replicas.server_access.ServerAccess",
    "enable_scale_out": True,  # token ids in, token ids out
}
"""Arguments without which a server does not accept weights, whoever starts it."""


@configurable
class VLLMServer(ReplicatedEngine, VLLMEngine):
    """One or several vLLM servers, started by us or already running.

    Servers that we start listen on the loopback interface at a random port, require a random key
    for every call, and end with this process. Tokens carry the version that wrote them, even if
    weights change in the middle of a completion. Its further settings are those of
    :class:`VLLMEngine` and :class:`ReplicatedEngine`.

    Args:
        urls: URLs of running servers, started as docs/sync.md shows: a list, or a
            :class:`ServerList` by which they join and leave during a run; None: start our own.
        replicas: number of servers to start.
        api_key_env: environment variable with the key of the servers at ``urls``; None: no key.
        devices: ``CUDA_VISIBLE_DEVICES`` of each server that we start; None: unchanged.
        dtype: dtype of the engine's weights; for servers at ``urls``, the one they were started
            with; None: the trainer's, but ``bfloat16`` for servers that we start on GPUs.
        tensor_parallel_size: GPUs (CPU processes) that share the model of each server that we
            start; for servers at ``urls``, the one they were started with.

    Raises:
        ConfigError: for invalid values.
    """

    starting = "vLLM servers start"

    def __init__(
        self,
        urls: list[str] | ServerList | None = None,
        replicas: int = 1,
        api_key_env: str | None = None,
        devices: list[str] | None = None,
        dtype: str | None = None,
        tensor_parallel_size: int = 1,
        **shared: Any,
    ) -> None:
        require_at_least(1, replicas=replicas, tensor_parallel_size=tensor_parallel_size)
        if urls is not None and (not urls or replicas > 1 or devices):
            raise ConfigError(
                f"urls={urls} are running servers; leave out replicas and devices, or leave out "
                "urls"
            )
        for url in urls if isinstance(urls, list) else []:
            require_url(url)
        if devices is not None and len(devices) != replicas:
            raise ConfigError(f"devices={devices} must name one entry for each of {replicas=}")
        for entry in devices or []:
            if entry.count(",") + 1 < tensor_parallel_size:
                raise ConfigError(
                    f"devices={devices}: {entry!r} has fewer devices than {tensor_parallel_size=}; "
                    "name as many for each server, like '0,1'"
                )
        super().__init__(dtype=dtype, **shared)
        transfer = self._settings.options.get("weight_transfer_config") or {}
        self.transfer_backend = str(transfer.get("backend", OUR_TRANSFER))
        self.urls = urls
        listed = len(urls) if isinstance(urls, list) else 2  # of a ServerList: several
        self.replica_count = replicas if urls is None else listed
        self.devices = devices
        self.tensor_parallel_size = tensor_parallel_size
        self.api_key_env = api_key_env
        self._max_length = 0  # of those that it started with; who joins has as much
        self._ends: list[int] = []
        self._follower: asyncio.Task[None] | None = None

    def _dtype_beside(self, trainer: str) -> str:
        return trainer if self.urls is not None else super()._dtype_beside(trainer)

    def must_merge(self, rank: int) -> str | None:
        if self.transfer_backend != OUR_TRANSFER:
            return f"vLLM's own transfer, backend {self.transfer_backend}, brings whole weights"
        if self.urls is not None and self.adapters is None:
            return "servers at urls may lack --enable-lora; if they have it, set adapters: apart"
        return super().must_merge(rank)

    def _lacks_adapters(self) -> str | None:
        # What vLLM there is at urls, each says when it is connected.
        return None if self.urls is not None else super()._lacks_adapters()

    def configure_length(self, longest: Callable[[], int | None]) -> None:
        if self.urls is None:  # else the servers have theirs
            super().configure_length(longest)

    @property
    def max_length(self) -> int:
        return self._max_length

    async def _start(self) -> None:
        await super()._start()
        self._max_length = min(r.max_length for r in self.replicas if isinstance(r, HTTPReplica))
        if isinstance(self.urls, ServerList):
            self._follower = asyncio.create_task(
                follow(self.urls, self.supervision, self._replica_at, self.health_every_s)
            )

    async def _close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None
        await super()._close()

    def _make_replicas(self, model_dir: Path) -> list[Replica]:
        if self.urls is not None:
            self._ends = written_ends(str(model_dir))
            return [self._replica_at(url) for url in self._listed(self.urls)]
        shared = {"tensor_parallel_size": self.tensor_parallel_size}
        arguments = shared | self.settings.arguments(model_dir, self.trust_remote_code)
        command = server_command(arguments)
        return [self._own_replica(command, index) for index in range(self.replica_count)]

    def _listed(self, urls: list[str] | ServerList) -> list[str]:
        if isinstance(urls, list):
            return [url.rstrip("/") for url in urls]
        try:
            result = read_urls(urls)
        except OSError as error:
            raise EngineError(f"urls: {type(urls).__name__} cannot be read: {error}") from error
        if not result:
            raise EngineError(
                f"urls: {type(urls).__name__} contains no server; start one before the run, as "
                "docs/sync.md shows"
            )
        return result

    def _replica_at(self, url: str) -> HTTPReplica:
        return HTTPReplica(
            url,
            self._key(),
            None,
            self.takes_adapters,
            self._timeouts,
            shortest=self._max_length,
            lease_s=_LEASE * self.health_every_s,
            ends=self._ends,
            connections=self._connections(),
        )

    def _own_replica(self, command: list[str], index: int) -> HTTPReplica:
        key = secrets.token_urlsafe(32)
        # Not on the command line, which every user of the machine can read.
        environment = SERVER_ENVIRONMENT | self.settings.environment() | {"VLLM_API_KEY": key}
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[index]
        if self.replica_count > 1 and self.tensor_parallel_size == 1:
            environment = own_cores(index, self.replica_count) | environment
        if self.transfer_backend == "ipc":
            # Handles of GPU memory come pickled, from who has the key.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        launch = partial(ListeningServer, command, environment)
        own = key, launch, self.takes_adapters, self._timeouts
        return HTTPReplica("http://127.0.0.1", *own, connections=self._connections())

    def _connections(self) -> int:
        """Return how many completions to ask each server for at a time: half of the files that this
        process may open, a quarter if it is not known how many servers there will be.
        """
        servers = (
            2 * self.replica_count if isinstance(self.urls, ServerList) else self.replica_count
        )
        return max(1, min(_MOST_CONNECTIONS, raise_file_limit() // 2 // servers))

    def _key(self) -> str:
        if self.api_key_env is None:
            return ""
        if self.api_key_env not in os.environ:
            raise EngineError(
                f"api_key_env={self.api_key_env!r}: this environment variable is not set; set it "
                "to the servers' key, or use api_key_env: null for servers without one"
            )
        return os.environ[self.api_key_env]


def own_cores(index: int, count: int) -> dict[str, str]:
    """Return variables that bind one of several CPU servers to its own cores.

    By default vLLM binds all of them to the same cores. A binding set by the user is kept.
    """
    if torch.cuda.is_available() or _BIND in os.environ or not hasattr(os, "sched_getaffinity"):
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {_BIND: ",".join(map(str, cores[index % len(cores) :: count]))}


def server_command(arguments: dict[str, Any]) -> list[str]:
    """Return the command that starts a server for :class:`VLLMServer`."""
    # Not `vllm serve`: that looks for a package named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in (SERVER_ARGUMENTS | arguments).items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            command += [f"--{flag}", text]
    return command
