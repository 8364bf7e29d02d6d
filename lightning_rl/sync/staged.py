"""What the memory and the collective transport share: weights staged in flat buffers."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.sync import buckets
from lightning_rl.sync.remote import RemoteTransport
from lightning_rl.sync.sources import Bucket


class StagedTransport(RemoteTransport):
    """Copies weights to flat buffers, casting them to the engine's dtype on the way.

    Args:
        bucket_mb: MiB per buffer; a larger module has one of its own size.
        keep_copy: one buffer for each bucket, from which a restarted replica is filled: as much
            memory as the engine's weights. Otherwise two buffers are used in turn, and a restarted
            replica waits for the next push.
        changed_only: send only modules that differ from what was sent last; needs ``keep_copy``.
        timeout_s: for each step of a push, and each bucket.

    Raises:
        ConfigError: for impossible values.
    """

    def __init__(
        self, bucket_mb: float, keep_copy: bool, changed_only: bool, timeout_s: float
    ) -> None:
        super().__init__(timeout_s, changed_only)
        require_at_least(0.001, bucket_mb=bucket_mb)
        if changed_only and not keep_copy:
            raise ConfigError(
                "changed_only=true compares with what was sent last; set keep_copy: true, too"
            )
        self.bucket_mb = bucket_mb
        self.keep_copy = keep_copy
        self._sent: list[Bucket] = []  # the last push, complete

    @property
    def _keeps(self) -> bool:
        return self.keep_copy

    def _stage(
        self,
        engine: ReplicatedEngine,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        everything: bool,
    ) -> Iterator[Bucket]:
        dtype: torch.dtype = getattr(torch, engine.dtype)
        max_numel = int(self.bucket_mb * 2**20) // dtype.itemsize
        self._sent = []
        cut = buckets.cut(buckets.checked(weights, engine.shapes), max_numel)
        for index, bucket in enumerate(cut):
            # Two in turn: one is loaded by the engines while the next is written.
            slot = index if self.keep_copy else index % 2
            flat = self._buffer(slot, bucket.numel, dtype, bucket.weights[0][1].device)
            changed = bucket.copy_changed(flat, everything)
            told = {"slot": slot, "numel": bucket.numel, "dtype": engine.dtype}
            told |= self._place(slot, flat)
            self._sent.append(told | {"tensors": bucket.entries()})
            if changed:
                yield told | {"tensors": changed}

    def _again(self, version: int) -> Iterator[Bucket]:
        yield from self._sent

    @abstractmethod
    def _buffer(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer, of ``numel`` elements; what it held before is still in it."""

    def _place(self, slot: int, flat: Tensor) -> Bucket:
        """Where workers find it."""
        return {}
