"""What the memory and the collective transport share: weights staged in flat buffers."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import count, cycle

import torch
from torch import Tensor

from lightning_rl.engines.base import Engine, checked
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.sync.adapters import divide
from lightning_rl.sync.buckets import cut
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
        adapters_only: send a LoRA's base once, and then its adapters alone; needs ``keep_copy``.
        timeout_s: for each step of a push, and each bucket.

    Raises:
        ConfigError: for impossible values.
    """

    def __init__(
        self,
        bucket_mb: float,
        keep_copy: bool,
        changed_only: bool,
        adapters_only: bool,
        timeout_s: float,
    ) -> None:
        super().__init__(timeout_s, changed_only, adapters_only)
        require_at_least(0.001, bucket_mb=bucket_mb)
        if changed_only and not keep_copy:
            raise ConfigError(
                "changed_only=true compares with what was sent last; set keep_copy: true, too"
            )
        if adapters_only and not keep_copy:
            raise ConfigError(
                "adapters_only=true sends the base again from a copy; set keep_copy: true, too"
            )
        self.bucket_mb = bucket_mb
        self.keep_copy = keep_copy
        # The last push, complete; of adapters alone, with the base that a push before brought.
        self._sent_adapters: list[Bucket] = []
        self._sent: list[Bucket] = []

    def kept_bytes(self, engine: Engine, elements: int) -> int:
        keeps = self.keep_copy and isinstance(engine, ReplicatedEngine)
        return engine.weight_bytes(elements) if keeps else 0

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
        adapters, others = divide(weights)
        self._sent_adapters = []
        yield from self._fill(adapters.items(), "float32", count(-1, -1), True, self._sent_adapters)
        if others is not None:
            self._sent = []
            # Two in turn: one is loaded by the engines while the next is written.
            slots = count() if self.keep_copy else cycle((0, 1))
            whole = checked(others, engine.shapes)
            yield from self._fill(whole, engine.dtype, slots, everything, self._sent)
            self._has_base = self.adapters_only
        elif everything:
            yield from self._sent

    def _fill(
        self,
        weights: Iterable[tuple[str, Tensor]],
        dtype_name: str,
        slots: Iterator[int],
        everything: bool,
        sent: list[Bucket],
    ) -> Iterator[Bucket]:
        dtype: torch.dtype = getattr(torch, dtype_name)
        max_numel = int(self.bucket_mb * 2**20) // dtype.itemsize
        for slot, bucket in zip(slots, cut(weights, max_numel), strict=False):
            flat = self._buffer(slot, bucket.numel, dtype, bucket.weights[0][1].device)
            changed = bucket.copy_changed(flat, everything)
            told = {"slot": slot, "numel": bucket.numel, "dtype": dtype_name}
            told |= self._place(slot, flat)
            sent.append(told | {"tensors": bucket.entries()})
            if changed:
                yield told | {"tensors": changed}

    def _again(self, version: int) -> Iterator[Bucket]:
        yield from self._sent_adapters
        yield from self._sent

    @abstractmethod
    def _buffer(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer, of ``numel`` elements; what it held before is still in it."""

    def _place(self, slot: int, flat: Tensor) -> Bucket:
        """Where workers find it."""
        return {}
