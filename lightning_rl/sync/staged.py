"""Transports that stage weights in a place from which engines fetch them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_rl.engines.base import Engine
from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.replicas.replica import Replica
from lightning_rl.engines.replicas.replicated import OUR_TRANSFER, ReplicatedEngine
from lightning_rl.errors import ConfigError, WeightSyncError, require_at_least
from lightning_rl.sync.base import InProcess, MergedInProcess, WeightTransport
from lightning_rl.sync.replicas import ReplicaPush, submit
from lightning_rl.sync.stream import (
    Bucket,
    WeightPart,
    WeightReceiver,
    Weights,
    minor_version,
    parts_of,
)

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy


class StagedTransport(WeightTransport):
    """Stages weights part by part (:meth:`stage`); an engine fetches them (:meth:`fetch`).

    Engines in separate processes import this class for that. For an engine in this process, the
    transport is both ends.

    Args:
        timeout_s: time limit of each step of a push, and of each bucket.
        keep_copy: whether all buckets stay in place until the next push.
        adapters_only: send a LoRA's base once, and then its adapters alone.
        bucket_mb: MiB of weights per part; a larger module is a part of its own.

    Raises:
        ConfigError: for values out of range, or ``adapters_only`` without ``keep_copy``.
    """

    stages_in_memory: ClassVar[bool] = False
    """Whether kept buckets are in host memory."""
    by_reference: ClassVar[bool] = False
    """Whether an engine in this process gets the trainer's own tensors, and nothing is staged."""
    leaves_out: ClassVar[bool] = False
    """True if :meth:`stage` accepts parts without the frozen weights that it staged before
    (``WeightPart.before``); False: it gets all weights each time."""
    shared_packages: ClassVar[tuple[str, ...]] = ("lightning_rl",)
    """Packages of which engines in other processes need the trainer's minor version."""
    _route: WeightTransport | None = None

    def __init__(
        self,
        timeout_s: float = 300.0,
        keep_copy: bool = True,
        adapters_only: bool = False,
        bucket_mb: float = 256.0,
    ) -> None:
        require_at_least(0.1, timeout_s=timeout_s)
        require_at_least(0.001, bucket_mb=bucket_mb)
        if adapters_only and not keep_copy:
            raise ConfigError(
                "adapters_only=true sends the base again from a copy; also set keep_copy: true"
            )
        self.timeout_s = timeout_s
        self.keep_copy = keep_copy
        self.adapters_only = adapters_only
        self.bucket_mb = bucket_mb

    @abstractmethod
    def stage(self, part: WeightPart) -> Bucket:
        """Put a part of a push where the receiver finds it, and return where that is.

        Engines may still be loading the part before.
        """

    def end_push(self, version: int) -> None:
        """Clean up, if needed, after all parts of a version have been staged and are kept."""

    @staticmethod
    def fetch(bucket: Bucket) -> Weights:
        """Return a bucket's weights, under their Hugging Face names; runs in the engine.

        Raises:
            DamagedWeightsError: if they are not what was staged.
        """
        raise NotImplementedError

    @classmethod
    def receiver(cls, device: torch.device, rank: int, **options: Any) -> WeightReceiver:
        """Return the object that fetches, made once in each worker; it may hold a connection.

        Args:
            device: device of the worker's model.
            rank: the worker's rank within its engine.
            options: the sender's settings of the connection.
        """
        return WeightReceiver(cls.fetch)

    def kept_bytes(self, engine: Engine, elements: int) -> int:
        keeps = self.stages_in_memory and self.keep_copy and isinstance(engine, ReplicatedEngine)
        return engine.weight_bytes(elements) if keeps else 0

    # ---------------------------------------------------------------- routes

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        self._route = self.route_to(engine)

    @property
    def route(self) -> WeightTransport:
        """The transport to the connected engine.

        Raises:
            WeightSyncError: before ``connect``.
        """
        if self._route is None:
            raise WeightSyncError(
                f"{type(self).__name__} is not connected; call connect(engine) first"
            )
        return self._route

    def weights_of(self, policy: "Policy") -> Weights:
        return self.route.weights_of(policy)

    def push(self, weights: Weights, version: int) -> None:
        self.route.push(weights, version)

    def held_digests(self, engine: Engine, names: Sequence[str]) -> list[HeldDigests]:
        return self.route.held_digests(engine, names)

    def close(self) -> None:
        if self._route is not None:
            self._route.close()
            self._route = None

    def route_to(self, engine: Engine) -> WeightTransport:
        """Return the transport that pushes to ``engine``."""
        if isinstance(engine, ReplicatedEngine):
            self._require_other_end(engine)
            return ReplicaPush(self, engine)
        passage = None if self.by_reference else partial(self._passage, engine)
        merges = self.adapters_only and not engine.takes_adapters
        return (MergedInProcess if merges else InProcess)(engine, passage)

    def _passage(self, engine: Engine, weights: Weights, version: int) -> Weights:
        """Return the weights of a push to an engine in this process, as they arrive."""
        dtype = getattr(torch, engine.dtype)
        parts = parts_of(weights, dtype, version, self.bucket_mb)
        buckets: Iterable[Bucket] = map(self.stage, parts)
        if self.keep_copy:  # then what cannot be staged leaves the engine as it is
            buckets = list(buckets)
            self.end_push(version)
        return _fetched(self.receiver(torch.device("cpu"), 0), buckets)

    def _require_other_end(self, engine: ReplicatedEngine) -> None:
        if engine.transfer_backend != OUR_TRANSFER:
            raise ConfigError(
                f"{type(self).__name__} does not work with the engine's weight_transfer_config, "
                f"backend: {engine.transfer_backend}; leave that out, or use NCCLTransport or "
                "IPCTransport"
            )
        module, _, name = self._other_end().partition(".")
        if module == "__main__" or "<locals>" in name:
            raise ConfigError(
                f"the engine's processes need to import {type(self).__name__}, which they cannot "
                "from a function or from the script that runs; move it to a module"
            )

    # ---------------------------------------------------------------- connections to replicas

    def join(self, replica: Replica) -> None:
        """Connect to a replica that was started since the last push."""
        self.invite(replica).result()

    def invite(self, replica: Replica, **options: Any) -> Future[Any]:
        """Let a replica's workers make their receivers, with these options."""
        options["versions"] = {package: minor_version(package) for package in self.shared_packages}
        info = {"transport": self._other_end(), "options": options}
        step = "init_weight_transfer_engine"
        return submit(replica.transfer(step, self.timeout_s, init_info=info))

    def transmit(self, bucket: Bucket, replica: Replica) -> None:
        """Send the data that a replica waits for after a bucket was announced."""

    def leave(self, replica: Replica) -> None:
        """Disconnect from a replica that is lost, or that has failed."""

    def _other_end(self) -> str:
        """Return the import path of the class that defines how to fetch: this one or a base."""
        names = ("fetch", "receiver")
        cls = next(c for c in type(self).__mro__ if any(name in vars(c) for name in names))
        return f"{cls.__module__}.{cls.__qualname__}"


def _fetched(receiver: WeightReceiver, buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    try:
        for bucket in buckets:
            yield from receiver.fetch(bucket)
    finally:
        receiver.close()
