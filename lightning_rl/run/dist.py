"""Messages between ranks. On one process all of this is an exact no-op."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import chain, zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rl.errors import ConfigError, LightningRLError

T = TypeVar("T")


def world_size() -> int:
    """Number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this one."""
    return dist.get_rank() if world_size() > 1 else 0


# ---------------------------------------------------------------- tensors


def all_sum(value: Tensor) -> Tensor:
    """The sum of ``value`` over all ranks, without gradient."""
    return value if world_size() == 1 else _reduced(value, dist.ReduceOp.SUM)


def all_max(value: Tensor) -> Tensor:
    """The element-wise maximum of ``value`` over all ranks."""
    return value if world_size() == 1 else _reduced(value, dist.ReduceOp.MAX)


def global_mean_std(values: Tensor, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a vector spread over all ranks.

    ``unbiased``: of n values the variance is divided by n - 1, as torch has it, not by n.
    """
    values = values.double()
    count, total = all_sum(torch.stack([torch.ones_like(values).sum(), values.sum()]))
    mean = total / count
    variance = all_sum(((values - mean) ** 2).sum()) / (count - int(unbiased)).clamp(min=1)
    return mean.float(), variance.sqrt().float()


def take_from_rank_zero(value: Tensor) -> None:
    """Overwrite ``value`` with rank 0's."""
    if world_size() > 1:
        group, device = _route(value.device)
        shared = value.detach().to(device, copy=True)
        dist.broadcast(shared, 0, group=group)
        value.detach().copy_(shared)


def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor with the sum of all ranks'; they are sent many at a time.

    All ranks give tensors of the same sizes in the same order.
    """
    if world_size() == 1:
        return
    for bucket in _buckets(tensors):
        summed = all_sum(torch.cat([tensor.flatten() for tensor in bucket]))
        parts = summed.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.reshape(tensor.shape))


_BUCKET = 8 * 2**20
"""Elements from which on tensors are sent, so that a copy of a large model is never whole."""


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.numel()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _reduced(value: Tensor, operation: Any) -> Tensor:
    group, device = _route(value.device)
    total = value.detach().to(device, copy=True)
    dist.all_reduce(total, operation, group=group)
    return total.to(value.device)


def _route(device: torch.device) -> tuple[Any, torch.device]:
    """The group that takes tensors of a device (None: the default one), and where it has them."""
    # NCCL can reduce on GPUs only, and gloo is asked for it on CPUs only.
    over_nccl = _trains_over_nccl() and device.type == "cuda"
    return (None, device) if over_nccl else (_control(), torch.device("cpu"))


# ---------------------------------------------------------------- the group for control

_LONGEST_WAIT = timedelta(days=7)
"""For a rank that generates or computes rewards; one that died is noticed at once."""
_beside: Any = None


def _control() -> Any:
    """The group for what is on no GPU: None, the default one, or a gloo group beside one of NCCL.

    It is made by the first message, which all ranks send; so each makes it at the same place.

    Raises:
        ConfigError: if gloo finds no way between the ranks.
    """
    global _beside
    if not _trains_over_nccl():
        return None
    if not _is_there(_beside):
        try:
            _beside = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        except RuntimeError as error:
            raise ConfigError(
                f"the ranks have no gloo group beside NCCL, for what is no tensor on a GPU: {error}"
                "; set the environment variable GLOO_SOCKET_IFNAME to the network interface "
                "between the machines"
            ) from error
    return _beside


def _trains_over_nccl() -> bool:
    return "nccl" in dist.get_backend()


def _is_there(group: Any) -> bool:
    """Tell whether it belongs to the present default group, not to one that was destroyed."""
    try:
        return group is not None and bool(dist.get_backend(group))
    except ValueError:
        return False


# ---------------------------------------------------------------- anything else


def all_reduce_max(value: float) -> float:
    """The largest of all ranks' numbers."""
    return value if world_size() == 1 else float(all_max(torch.tensor(value, dtype=torch.double)))


def any_rank(flag: bool) -> bool:
    """Tell whether it is so on any rank."""
    return bool(all_reduce_max(float(flag)))


def gather(value: T) -> list[T]:
    """Every rank's value (it is pickled), by rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control())
    return values


def from_rank_zero(value: T) -> T:
    """Rank 0's value (it is pickled)."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0, group=_control())
    return values[0]


def scatter(items: Sequence[T]) -> list[T]:
    """Rank 0's list (it is pickled), dealt out in turn; what others pass is not looked at."""
    if world_size() == 1:
        return list(items)
    share: list[Any] = [None]
    hands = [items[r :: world_size()] for r in range(world_size())] if rank() == 0 else None
    dist.scatter_object_list(share, hands, 0, group=_control())
    return list(share[0])


def shard(items: Sequence[T]) -> list[T]:
    """Take this rank's share of a list that all ranks have: every n-th, in order."""
    return list(items[rank() :: world_size()])


def interleaved(shares: Sequence[Sequence[T]]) -> list[T]:
    """The first of every rank, then the second of every rank, and so on: what was dealt."""
    rounds = zip_longest(*shares, fillvalue=_NOTHING)
    return [item for item in chain.from_iterable(rounds) if item is not _NOTHING]


def reshard(shares: Sequence[Sequence[T]], rank: int, ranks: int) -> list[T]:
    """Deal other ranks' shares anew, now that there are ``ranks``; of as many, each its own.

    The k-th of each rank comes before the (k + 1)-th of any, so that a list that was dealt to some
    is shared by others as if it had been dealt to them.
    """
    return list(shares[rank] if len(shares) == ranks else interleaved(shares)[rank::ranks])


_NOTHING: Any = object()


def all_reduce_sum(metrics: dict[str, float]) -> dict[str, float]:
    """Sums over the ranks that have a metric of that name."""
    sums: dict[str, float] = {}
    for ours in gather(metrics):
        for name, value in ours.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


@contextmanager
def every_rank() -> Iterator[None]:
    """Fail on all ranks, with the same error, if one fails; none waits for one that is gone.

    All ranks must come here. In the block there may be no collective (but for blocks of this kind),
    because a rank that fails does not reach it.

    Raises:
        LightningRLError: of the same class, and naming the rank, if another rank raised one.
    """
    if world_size() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # raised below, when the others know
        if hasattr(error, _KNOWN):  # from a block within this one
            raise
        failure = error
    if any_rank(failure is not None):
        told = gather(None if failure is None else _description(failure))
        if failure is None:
            number, (kind, message, *more) = next(
                (n, d) for n, d in enumerate(told) if d is not None
            )
            failure = kind(f"rank {number}: {message}", *more)
        setattr(failure, _KNOWN, True)
        raise failure


_KNOWN = "known_to_all_ranks"


def _description(error: Exception) -> tuple[Any, ...]:
    """A class that the other ranks can raise, a message, and what else it is made of."""
    if isinstance(error, LightningRLError):
        return type(error), *error.described()
    return LightningRLError, f"{type(error).__name__}: {error}"


_log = logging.getLogger(__name__)


@cache
def fell_back(fast: str, reason: str, instead: str) -> None:
    """Warn, on rank 0 and the first time, that ``instead`` does what ``fast`` would do faster."""
    if rank() == 0:
        _log.warning("%s is not used: %s; %s is, which is slower", fast, reason, instead)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say what happens in the block, and in the end how long it took; on rank 0, if it is said.

    On stderr, as Lightning's own messages. Two lines, since others may print between them.
    """
    if not what or rank() > 0:
        yield
        return
    begin = time.perf_counter()
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
    print(f"{what}: done in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
