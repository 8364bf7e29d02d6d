"""RayReplica: a Ray actor with vLLM in it; both the local side and the actor's side."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.replicas.replica import (
    HEALTH_TIMEOUT_S,
    Replica,
    ReplicaLost,
    Timeouts,
    worker_error,
)
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.vllm.local import VLLMLocal
from lightning_rl.engines.vllm.lora import keep_apart
from lightning_rl.engines.vllm.process import last_line
from lightning_rl.errors import EngineError, ReplicaError, SyncTimeoutError, first_line
from lightning_rl.run.loop.background import runtime
from lightning_rl.run.processes.machine import this_machine

_WORKER = "lightning_rl.sync.vllm_worker"


class _HostedVLLM(VLLMLocal):
    """VLLMLocal that receives weights through vLLM's weight-transfer API, as servers do."""

    _shares_process = False

    def _own_device(self) -> int | None:
        # Several workers are processes of their own, and this one then touches no GPU.
        alone = self._settings.options.get("tensor_parallel_size", 1) == 1
        return super()._own_device() if alone else None

    def start(self, model_dir: Path) -> None:
        super().start(model_dir)
        if self._settings.options.get("enable_lora"):
            self._llm.collective_rpc(keep_apart)

    def transfer(self, step: str, arguments: Mapping[str, Any]) -> None:
        """Do one step of a push, between two steps of generation."""
        with self._exclusive:
            if step == "start_weight_update":
                self._begin_update(self)
            self._llm.collective_rpc(step, kwargs=dict(arguments))

    def set_version(self, version: int) -> int:
        """End a push; return the version that the engine now holds."""
        with self._exclusive:
            self._llm.collective_rpc("finish_weight_update")
            self._end_update(version)
            return self.version

    def held_weights(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return what each worker holds under these names."""
        with self._exclusive:
            answers: list[dict[str, Any]] = self._llm.collective_rpc("held_weights", args=(names,))
            return answers


class RayActor:
    """One engine in an actor. vLLM runs in other threads, so that the actor always answers.

    Args:
        settings: arguments of :class:`VLLMLocal`.
        tensor_parallel_size: processes that share the model; with 1 it is in this process.
        environment: environment variables to set before vLLM is imported.
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
        """Start from a model's files, which need not be on this machine; return the actor's
        location.
        """
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
        """Return True: this process is alive."""
        return True

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the engine's method of that name, in the background loop or a thread."""
        act = getattr(self._engine, method)
        if not iscoroutinefunction(act):
            return await asyncio.to_thread(act, *arguments)
        task = asyncio.run_coroutine_threadsafe(act(*arguments), runtime.loop)
        return await asyncio.wrap_future(task)


class RayReplica(Replica):
    """A replica in a :class:`RayActor`, which is created anew at every start.

    Args:
        title: name of the replica, for messages.
        make_actor: returns a handle of a new actor.
        model_files: the model's configuration and tokenizer.
        workers: the actor's processes that receive weights.
        timeouts: its time limits.
    """

    can_restart = True

    def __init__(
        self,
        title: str,
        make_actor: Callable[[], Any],
        model_files: Mapping[str, bytes],
        workers: int,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(title, "")
        self.workers = workers
        self.max_length = 0
        self._title = title
        self._make_actor = make_actor
        self._model_files = dict(model_files)
        self._timeouts = timeouts
        self._actor: Any = None

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        self.life += 1
        await asyncio.to_thread(self._end)
        self._actor = await asyncio.to_thread(self._make_actor)
        self.name = f"{self._title} (actor {self._actor._actor_id.hex()[:12]})"
        try:
            about = await self._call("start", self._timeouts.start, self._model_files)
        except SyncTimeoutError as error:
            raise ReplicaError(
                f"{self.name} did not start within start_timeout_s={self._timeouts.start:g}; does "
                "the cluster have the devices that it needs (`ray status`)?"
            ) from error
        address = about["address"]
        self.name = f"{self.name.removesuffix(')')} on node {address})"
        self.host = "localhost" if about["machine"] == this_machine() else address
        self.max_length = about["max_length"]
        self.gone.clear()

    def _end(self) -> None:
        if self._actor is not None:
            import ray

            actor, self._actor = self._actor, None
            if ray.is_initialized():
                ray.kill(actor)

    async def answers(self) -> bool:
        try:
            return bool(await self._call("answers", HEALTH_TIMEOUT_S))
        except EngineError:
            return False

    async def close(self) -> None:
        self.gone.set()
        await asyncio.to_thread(self._end)

    # ---------------------------------------------------------------- generation

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        completion: Completion = await self._call(
            "generate", self._timeouts.request, list(token_ids), sampling, seed
        )
        return completion

    async def pause(self) -> None:
        await self._call("pause", self._timeouts.call)

    async def resume(self) -> None:
        await self._call("resume", self._timeouts.call)

    # ---------------------------------------------------------------- weights

    async def transfer(self, step: str, timeout_s: float, **arguments: Any) -> Mapping[str, Any]:
        await self._call("transfer", timeout_s, step, arguments)
        return {}

    async def set_version(self, version: int, timeout_s: float) -> None:
        answered = await self._call("set_version", timeout_s, version)
        self._require_version(answered, version)

    async def held_digests(self, names: Sequence[str]) -> list[HeldDigests]:
        return self._held_digests(
            await self._call("held_weights", self._timeouts.call, list(names))
        )

    async def _call(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        if self._actor is None:
            raise ReplicaLost(f"{self.name} is closed")
        import ray
        from ray.exceptions import RayError, RayTaskError

        answer = None
        try:
            # Never waits; Ray makes what cannot be sent an error of the answer.
            if hasattr(RayActor, method):
                answer = getattr(self._actor, method).remote(*arguments)
            else:
                answer = self._actor.call.remote(method, *arguments)
            async with asyncio.timeout(timeout_s):
                return await answer
        except RayTaskError as error:
            raise self._refusal(error.cause) from None
        except RayError as error:
            raise ReplicaLost(f"{self.name} is gone: {first_line(error)}") from None
        except TimeoutError as error:
            ray.cancel(answer)
            raise SyncTimeoutError(
                f"{self.name} did not answer {method} within {timeout_s:g} s: it is stuck or too "
                "slow"
            ) from error
        except asyncio.CancelledError:
            if answer is not None and ray.is_initialized():
                ray.cancel(answer)
            raise

    def _refusal(self, cause: BaseException) -> EngineError:
        """Return the error that the actor raised, of its own class if that is one of ours."""
        if (error := worker_error(self.name, str(cause))) is not None:
            return error
        kind = type(cause) if isinstance(cause, EngineError) else EngineError
        return kind(f"{self.name}: {last_line(cause)}")
