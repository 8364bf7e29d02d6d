"""vLLM in Ray actors, on one machine or a cluster."""

import asyncio
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.replicas.ray_replica import RayActor, RayReplica
from lightning_rl.engines.replicas.replica import Replica
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.engines.vllm.process import last_line
from lightning_rl.engines.vllm.settings import VLLMEngine
from lightning_rl.errors import ConfigError, ReplicaError, require_at_least

_PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_CALLS_AT_ONCE = 100_000
"""Concurrent calls of an actor: all requests wait inside vLLM, so that none delays a pause."""
_CONNECT_TIMEOUT_S = 10.0


@configurable
class RayEngine(ReplicatedEngine, VLLMEngine):
    """vLLM in Ray actors: several replicas, each optionally with tensor parallelism.

    Actors only need this library, Ray and vLLM installed on their node. Each reserves a bundle of
    resources in one placement group; an actor that dies is replaced, possibly on another node. They
    end with this process, and so does a Ray cluster that it started. Its further settings are those
    of :class:`VLLMEngine` and :class:`ReplicatedEngine`.

    Args:
        address: address of a cluster of which this machine is a node, ``host:port`` or ``auto``;
            None: ``RAY_ADDRESS`` if set, else a new one of this run's own; others on this machine
            are left alone.
        replicas: number of actors.
        tensor_parallel_size: GPUs (CPU processes) that share each replica's model.
        bundle: resources that an actor reserves; None: ``tensor_parallel_size`` GPUs, or CPUs if
            the cluster has no GPU.
        placement: Ray's placement strategy: ``SPREAD``, ``PACK``, ``STRICT_SPREAD`` or
            ``STRICT_PACK``.
        dtype: dtype of the engine's weights; None: the trainer's, but ``bfloat16`` if the trainer
            has a GPU.
        environment: environment variables of the actors' processes.
        ray_options: further arguments of ``ray.init``.

    Raises:
        ConfigError: for invalid values, or without Ray.
    """

    starting = "vLLM starts in Ray actors"

    def __init__(
        self,
        address: str | None = None,
        replicas: int = 2,
        tensor_parallel_size: int = 1,
        bundle: dict[str, float] | None = None,
        placement: str = "SPREAD",
        dtype: str | None = None,
        *,
        environment: dict[str, str] | None = None,
        ray_options: dict[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        require_at_least(1, replicas=replicas, tensor_parallel_size=tensor_parallel_size)
        if placement not in _PLACEMENTS:
            raise ConfigError(f"placement={placement!r} must be one of {', '.join(_PLACEMENTS)}")
        if address is not None:
            _require_node_address(address)
        if find_spec("ray") is None:
            raise ConfigError(
                "RayEngine needs Ray, which is not installed; run `pip install 'ray>=2.50,<3'`, or "
                "use VLLMServer"
            )
        super().__init__(dtype=dtype, **shared)
        self.address = address
        self.replica_count = replicas
        self.tensor_parallel_size = tensor_parallel_size
        self.bundle = bundle
        self.placement = placement
        self.environment = environment or {}
        self.ray_options = ray_options or {}
        self._group: Any = None
        self._connected_here = False

    @property
    def max_length(self) -> int:
        return min(r.max_length for r in self.replicas if isinstance(r, RayReplica))

    # ---------------------------------------------------------------- life

    def _make_replicas(self, model_dir: Path) -> list[Replica]:
        files = {path.name: path.read_bytes() for path in model_dir.iterdir() if path.is_file()}
        try:
            self._connect()
            bundle = self._reserve()
        except BaseException:
            self._release()
            raise
        return [self._replica(index, bundle, files) for index in range(self.replica_count)]

    def _replica(self, index: int, bundle: dict[str, float], files: dict[str, bytes]) -> RayReplica:
        def make_actor() -> Any:
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            if not ray.is_initialized():  # Ray would start a cluster of its own
                raise ReplicaError(f"Ray was shut down under replica {index} of RayEngine")
            others = {kind: n for kind, n in bundle.items() if kind not in ("CPU", "GPU")}
            actor_class = ray.remote(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=others,
                max_concurrency=_CALLS_AT_ONCE,
                max_restarts=0,  # whoever restarts it must fill it with weights
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )(RayActor)
            settings = dataclasses.asdict(self.settings)
            if self.trust_remote_code:
                settings["options"]["trust_remote_code"] = True
            return actor_class.remote(settings, self.tensor_parallel_size, self.environment)

        title = f"replica {index} of RayEngine"
        return RayReplica(title, make_actor, files, self.tensor_parallel_size, self._timeouts)

    def close(self) -> None:
        super().close()
        self._release()

    # ---------------------------------------------------------------- the cluster

    def _connect(self) -> None:
        with _contained():
            import ray

            if ray.is_initialized():  # by the user, whose it stays
                return
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            # Ray gives workers the lowest priority, so that they compute only what others leave.
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Without an address, Ray would join any cluster that runs here, another user's too.
            address = self.address or os.environ.get("RAY_ADDRESS") or "local"
            try:
                _require_listener(address)
                ray.init(**{**options, "address": address, **self.ray_options})
            except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
                where = "on this machine" if address == "local" else f"at address={address!r}"
                if _lacks_token(error):
                    raise ReplicaError(
                        f"the Ray cluster {where} requires a token; set RAY_AUTH_MODE=token for "
                        "this command, with the cluster's token in ~/.ray/auth_token (`ray "
                        "get-auth-token`) or in RAY_AUTH_TOKEN"
                    ) from error
                raise ReplicaError(
                    f"there is no Ray cluster {where}: {last_line(error)}; is this machine a node "
                    "of one (`ray status`)?"
                ) from error
            self._connected_here = True

    async def _bring_back(self, replica: Replica) -> None:
        await asyncio.to_thread(self._require_head)  # who makes the new actor
        await super()._bring_back(replica)

    def _require_head(self) -> None:
        """Check that the cluster's head answers: Ray's own calls would wait for it for hours.

        Raises:
            ReplicaError: if it does not.
        """
        import ray

        if not ray.is_initialized():
            return
        address = ray.get_runtime_context().gcs_address
        try:
            _require_listener(address)
        except OSError as error:
            raise ReplicaError(
                f"the head of the Ray cluster at {address} is gone ({error}), so no actor can be "
                "started; start a cluster again, and the run with --ckpt_path last"
            ) from error

    def _reserve(self) -> dict[str, float]:
        """Reserve one bundle of resources for each replica; return the bundle."""
        import ray

        has = ray.cluster_resources()
        kind = "GPU" if has.get("GPU") else "CPU"
        bundle = self.bundle or {kind: float(self.tensor_parallel_size)}
        self._group = ray.util.placement_group(
            [bundle] * self.replica_count, strategy=self.placement
        )
        if not self._group.wait(self._timeouts.start):
            found = {kind: n for kind, n in has.items() if ":" not in kind}
            raise ReplicaError(
                f"Ray did not reserve {self.replica_count} times {bundle} ({self.placement}) "
                f"within start_timeout_s={self._timeouts.start:g}; the whole cluster has {found}. "
                "Request fewer replicas, or another bundle or placement"
            )
        return bundle

    def _release(self) -> None:
        if self._group is None and not self._connected_here:
            return
        import ray

        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            with suppress(ReplicaError):  # its reservations have ended with the head
                self._require_head()
                ray.util.remove_placement_group(group)
        if self._connected_here:
            self._connected_here = False
            ray.shutdown()


def _lacks_token(error: BaseException) -> bool:
    """Return True if Ray lacks its token; it reports that only as a cause of its last error."""
    cause: BaseException | None = error
    while cause is not None and "AuthenticationError" not in f"{type(cause).__name__}: {cause}":
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _require_node_address(address: str) -> None:
    _, _, port = address.rpartition(":")
    if "://" in address or not (port.isdigit() or address in ("auto", "local")):
        raise ConfigError(
            f"address={address!r} must be host:port of a cluster of which this machine is a node, "
            "or auto (Ray Client's ray:// does not support pushing weights)"
        )


def _require_listener(address: str) -> None:
    """Try to connect first, because Ray itself retries for minutes.

    Raises:
        OSError: if nothing listens at the address.
    """
    _require_node_address(address)
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()


@contextmanager
def _contained() -> Iterator[None]:
    """Undo Ray's changes to this process; its SIGTERM handler would lose unsaved work."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would end this process, unsaved, when the cluster's head has been gone for a minute.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(24 * 3600))
    hook, handler = sys.excepthook, signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        sys.excepthook = hook
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
