"""Messages between ranks. With one process all of them are exact no-ops."""

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
    """Return the number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among the training processes."""
    return dist.get_rank() if world_size() > 1 else 0


# ---------------------------------------------------------------- tensors


def all_sum(value: Tensor) -> Tensor:
    """Return the sum of ``value`` over all ranks, without gradient."""
    return value if world_size() == 1 else _reduced(value, dist.ReduceOp.SUM)


def all_max(value: Tensor) -> Tensor:
    """Return the element-wise maximum of ``value`` over all ranks."""
    return value if world_size() == 1 else _reduced(value, dist.ReduceOp.MAX)


def global_mean_std(values: Tensor, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a vector that is spread over all ranks.

    ``unbiased``: divide the variance of n values by n - 1, as torch does by default, not by n.
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
    """Overwrite each tensor with its sum over all ranks; they are sent in buckets.

    All ranks must pass tensors of the same sizes in the same order.
    """
    if world_size() == 1:
        return
    for bucket in _buckets(tensors):
        summed = all_sum(torch.cat([tensor.flatten() for tensor in bucket]))
        parts = summed.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.reshape(tensor.shape))


_BUCKET = 8 * 2**20
"""Elements per bucket at which it is sent, so that a large model is never copied as a whole."""


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
    """Return the group that takes tensors of a device (None: the default one), and the device for
    it.
    """
    # NCCL can reduce on GPUs only, and gloo is asked for it on CPUs only.
    over_nccl = _trains_over_nccl() and device.type == "cuda"
    return (None, device) if over_nccl else (_control(), torch.device("cpu"))


# ---------------------------------------------------------------- the group for control

_beside: Any = None


def _control() -> Any:
    """Return the group for data that is not on a GPU: None, the default one, or gloo beside NCCL.

    The gloo group is created by the first message, which all ranks send, so that each creates it at
    the same place.

    Raises:
        ConfigError: if gloo cannot connect the ranks.
    """
    global _beside
    if not _trains_over_nccl():
        return None
    if not _is_there(_beside):
        try:
            _beside = dist.new_group(backend="gloo", timeout=_timeout())
        except RuntimeError as error:
            raise ConfigError(
                "the ranks could not create a gloo group, which carries data that is not on a "
                f"GPU: {error}; set the environment variable GLOO_SOCKET_IFNAME to the network "
                "interface between the machines"
            ) from error
    return _beside


def _timeout() -> timedelta:
    """Return how long ranks wait for each other: the strategy's ``timeout``."""
    group: Any = dist.group.WORLD
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    waits: timedelta = group._get_backend(device).options._timeout
    return waits


def _trains_over_nccl() -> bool:
    return "nccl" in dist.get_backend()


def _is_there(group: Any) -> bool:
    """Return True if the group belongs to the present default group, and was not destroyed with an
    earlier one.
    """
    try:
        return group is not None and bool(dist.get_backend(group))
    except ValueError:
        return False


# ---------------------------------------------------------------- anything else


def all_reduce_max(value: float) -> float:
    """Return the largest of all ranks' numbers."""
    return value if world_size() == 1 else float(all_max(torch.tensor(value, dtype=torch.double)))


def any_rank(flag: bool) -> bool:
    """Return True on all ranks if ``flag`` is true on any."""
    return bool(all_reduce_max(float(flag)))


def gather(value: T) -> list[T]:
    """Return a list of every rank's value, which is pickled, ordered by rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control())
    return values


def from_rank_zero(value: T) -> T:
    """Return rank 0's value, which is pickled."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0, group=_control())
    return values[0]


def scatter(items: Sequence[T]) -> list[T]:
    """Deal out rank 0's list (it is pickled) item by item; other ranks' arguments are ignored."""
    if world_size() == 1:
        return list(items)
    share: list[Any] = [None]
    hands = [items[r :: world_size()] for r in range(world_size())] if rank() == 0 else None
    dist.scatter_object_list(share, hands, 0, group=_control())
    return list(share[0])


def shard(items: Sequence[T]) -> list[T]:
    """Return this rank's share of a list that all ranks have: every n-th item, in order."""
    return list(items[rank() :: world_size()])


def interleaved(shares: Sequence[Sequence[T]]) -> list[T]:
    """Undo a deal: return the first item of every rank, then the second of every rank, etc."""
    rounds = zip_longest(*shares, fillvalue=_NOTHING)
    return [item for item in chain.from_iterable(rounds) if item is not _NOTHING]


def reshard(shares: Sequence[Sequence[T]], rank: int, ranks: int) -> list[T]:
    """Deal the shares of a run with another number of ranks anew to ``ranks``; if equal, keep them.

    The k-th item of each rank comes before the (k + 1)-th of any, so the result is the same as if
    the original list had been dealt to the new number of ranks.
    """
    return list(shares[rank] if len(shares) == ranks else interleaved(shares)[rank::ranks])


_NOTHING: Any = object()


def all_reduce_sum(metrics: dict[str, float]) -> dict[str, float]:
    """Return the sum of each metric over the ranks that have it."""
    sums: dict[str, float] = {}
    for ours in gather(metrics):
        for name, value in ours.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


@contextmanager
def every_rank() -> Iterator[None]:
    """Fail on all ranks with the same error if one fails, so that none waits for one that is gone.

    All ranks must enter the block. It may contain no collective (but for blocks of this kind),
    because a rank that fails would not reach it.

    Raises:
        LightningRLError: if another rank raised an error: of the same class, naming the rank.
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
        failures = gather(None if failure is None else _description(failure))
        if failure is None:
            number, (kind, message, *more) = next(
                (n, d) for n, d in enumerate(failures) if d is not None
            )
            failure = kind(f"rank {number}: {message}", *more)
        setattr(failure, _KNOWN, True)
        raise failure


_KNOWN = "known_to_all_ranks"


def _description(error: Exception) -> tuple[Any, ...]:
    """Return a class that the other ranks can raise, the message, and its further arguments."""
    if isinstance(error, LightningRLError):
        return type(error), *error.described()
    return LightningRLError, f"{type(error).__name__}: {error}"


_log = logging.getLogger(__name__)


@cache
def fell_back(fast: str, reason: str, instead: str) -> None:
    """Warn, once and on rank 0, that the slower ``instead`` replaces ``fast``."""
    if rank() == 0:
        _log.warning(
            "%s cannot be used: %s; falling back to %s, which is slower", fast, reason, instead
        )


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Print what the block does, and at its end how long it took; on rank 0, unless ``what`` is
    empty.

    It prints to stderr, like Lightning, and on two lines, since others may print in between.
    """
    if not what or rank() > 0:
        yield
        return
    begin = time.perf_counter()
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
    print(f"{what}: done in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
