"""What vLLM's own weight transfer asks of a trainer: whom to tell of each step, and the weights."""

import base64
import pickle
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rl.engines.base import checked
from lightning_rl.engines.replica import Replica
from lightning_rl.sync.remote import submit


@dataclass(frozen=True)
class Declared:
    """A weight that will come, as vLLM asks for it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Stream:
    """The weights of a push, one at a time, on the device and in the dtype that go over."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.device = torch.device("cpu")
        self.weights: Iterable[tuple[str, Tensor]] = ()

    def metadata(self) -> list[Declared]:
        """What comes, in order."""
        return [Declared(name, self.dtype, tuple(shape)) for name, shape in self.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in checked(self.weights, self.shapes):
            yield name, weight.to(self.device, self.dtype)


class Fleet:
    """Tells all replicas of each step at the same time; what vLLM calls a client."""

    def __init__(self, replicas: list[Replica], timeout_s: float) -> None:
        self.replicas, self.timeout_s, self.version = replicas, timeout_s, -1
        self.refused: Exception | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect; in a group, each replica's workers come after those of the one before."""
        infos, rank = [], 1
        for replica in self.replicas:
            place = {"rank_offset": rank} if "rank_offset" in init_info else {}
            infos.append(init_info | place)
            rank += replica.workers
        try:
            self._all(
                replica.transfer("init_weight_transfer_engine", self.timeout_s, init_info=info)
                for replica, info in zip(self.replicas, infos, strict=True)
            )
        except Exception as error:
            self.refused = error
            raise

    def start_weight_update(self) -> None:
        """Begin a push."""
        self._all(replica.begin(self.timeout_s) for replica in self.replicas)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Tell what comes; done when all have loaded it."""
        info = dict(update_info)
        if (handles := info.pop("ipc_handles", None)) is not None:  # JSON has no bytes
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        told = {name: value for name, value in info.items() if value is not None}
        self._all(
            replica.transfer("update_weights", self.timeout_s, update_info=told)
            for replica in self.replicas
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End it: caches are dropped, and each says the version."""
        self._all(replica.set_version(self.version, self.timeout_s) for replica in self.replicas)

    def _all(self, calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
        for answer in [submit(call) for call in calls]:
            answer.result()
