"""Run ranks that share matrices as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rl.models.parallel.tensor import TensorRanks

T = TypeVar("T")


class ThreadRanks(TensorRanks):
    """One of ``size`` ranks, each a thread that meets the others where they add up."""

    def __init__(self, size: int, index: int, board: list[Any], barrier: Barrier) -> None:
        super().__init__(None, size)
        self.index, self._board, self._barrier = index, board, barrier

    def _reduced(self, part: Tensor, operation: Any) -> Tensor:
        self._board[self.index] = part
        self._barrier.wait()
        parts = torch.stack(list(self._board))
        self._barrier.wait()  # all have read it
        return parts.sum(0) if operation == dist.ReduceOp.SUM else parts.amax(0)


def on_threads(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """Return what each of so many ranks returns; a failure of one is that of all."""
    board, barrier = [None] * size, Barrier(size, timeout=60)

    def one(index: int) -> T:
        try:
            return work(ThreadRanks(size, index, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
