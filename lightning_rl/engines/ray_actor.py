"""Runs inside Ray's actors: vLLM in this process, told what to do by a RayReplica."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_rl.collect.loop import background_loop
from lightning_rl.engines.base import Completion, Sampling
from lightning_rl.engines.vllm_local import VLLMLocal

_WORKER = "lightning_rl.engines.vllm_worker"


def this_machine() -> str:
    """Equal for two processes that can open each other's files under ``/proc``."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class _HostedVLLM(VLLMLocal):
    """VLLMLocal that takes weights through vLLM's weight-transfer API, as servers do."""

    _beside_trainer = False

    def _own_device(self) -> int | None:
        # Several workers are processes of their own, and this one then touches no GPU.
        alone = self._settings.options.get("tensor_parallel_size", 1) == 1
        return super()._own_device() if alone else None

    def transfer(self, step: str, arguments: Mapping[str, Any]) -> None:
        """One step of a push, between two steps of generation."""
        with self._exclusive:
            if step == "start_weight_update":
                self._leave_version()
            self._llm.collective_rpc(step, kwargs=dict(arguments))

    def stamp(self, version: int) -> int:
        """End a push; returns the version that is held now."""
        with self._exclusive:
            self._llm.collective_rpc("finish_weight_update")
            self._enter_version(version)
            return self.version


class RayActor:
    """One engine. vLLM works in other threads, so that this one always answers.

    Args:
        settings: arguments of :class:`VLLMLocal`.
        tensor_parallel_size: processes that share the model; with 1 it is in this process.
        environment: variables to set before vLLM is imported.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tensor_parallel_size: int,
        environment: Mapping[str, str],
    ) -> None:
        os.environ.update(environment)
        options: dict[str, Any] = {
            "worker_extension_cls": f"{_WORKER}.WorkerExtension",
            "weight_transfer_config": {"backend": "lightning_rl"},
        }
        if tensor_parallel_size > 1:
            # Not Ray: vLLM would look for actors of its own, where this one has the devices.
            options |= {
                "tensor_parallel_size": tensor_parallel_size,
                "distributed_executor_backend": "mp",
            }
        self._engine = _HostedVLLM(**{**settings, "options": {**options, **settings["options"]}})

    async def start(self, model_files: Mapping[str, bytes]) -> dict[str, Any]:
        """Start from a model's files, which need not be on this machine; returns where it runs."""
        import ray

        with TemporaryDirectory() as directory:
            for name, content in model_files.items():
                Path(directory, name).write_bytes(content)
            await asyncio.to_thread(self._engine.start, Path(directory))
        return {
            "address": ray.util.get_node_ip_address(),
            "machine": this_machine(),
            "max_length": self._engine.max_length,
        }

    async def answers(self) -> bool:
        """Whether this process lives."""
        return True

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """As :meth:`Engine.generate`."""
        return await _in_background(self._engine.generate(token_ids, sampling, seed))

    async def pause(self) -> None:
        """As :meth:`Engine.pause`."""
        await _in_background(self._engine.pause())

    async def resume(self) -> None:
        """As :meth:`Engine.resume`."""
        await _in_background(self._engine.resume())

    async def transfer(self, step: str, arguments: Mapping[str, Any]) -> None:
        """One step of a push."""
        await asyncio.to_thread(self._engine.transfer, step, arguments)

    async def stamp(self, version: int) -> int:
        """End a push."""
        return await asyncio.to_thread(self._engine.stamp, version)


async def _in_background(coroutine: Any) -> Any:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, background_loop()))
