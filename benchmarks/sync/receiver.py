"""Receive weights for :mod:`benchmarks.sync` in a process, as a worker does."""

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.engines.replicas.replica import Replica
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.sync.adapters import Merger
from lightning_rl.sync.group import BroadcastGroup
from lightning_rl.sync.stream import receiver_of

TIMEOUT_S = 120.0


class Receiver:
    """Takes buckets from a source in another process, and copies them into its own weights."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}
        self.receiver: Any = None
        self.group: BroadcastGroup | None = None
        self.copies = True
        self.received = 0

    def set_copies(self, copies: bool) -> None:
        self.copies = copies

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        if self.receiver is not None:
            self.receiver.close()
        transport, options = init_info["transport"], init_info["options"]
        self.receiver = receiver_of(transport, torch.device("cpu"), 0, **options)
        self.merger = Merger(torch.device("cpu"))

    def start_weight_update(self) -> None:
        self.received = 0
        self.merger.begin()

    def bytes_received(self) -> int:
        return self.received

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        if update_info["bucket"] is not None:
            arrived = dict(self.receiver.fetch(update_info["bucket"]))
            self.received += sum(weight.nbytes for weight in arrived.values())
            merged = self.merger.take(arrived.items(), update_info["complete"])
            for name, weight in merged:
                if not self.copies:
                    continue
                if name not in self.own:
                    self.own[name] = torch.empty_like(weight)
                self.own[name].copy_(weight)

    def checksum(self) -> float:
        return float(sum(weight.double().sum() for weight in self.own.values()))

    def meet(self, port: int, numel: int) -> None:
        self.group = BroadcastGroup("127.0.0.1", port, 1, 2, "gloo", TIMEOUT_S)
        self.group.meet()
        self.flat = torch.zeros(numel)

    def receive(self) -> None:
        assert self.group is not None
        self.group.wait(self.group.broadcast(self.flat))


def serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    receiver = Receiver()
    while True:
        try:
            step, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(receiver, step)(**arguments))


class ProcessReplica(Replica):
    """A :class:`Receiver`, behind a pipe."""

    can_restart = False

    def __init__(self) -> None:
        super().__init__("receiver", "127.0.0.1")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)

    async def start(self) -> None:
        await asyncio.to_thread(self._process.start)
        self.life += 1
        self.gone.clear()

    async def answers(self) -> bool:
        return self._process.is_alive()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        raise NotImplementedError("it only takes weights")

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def transfer(self, step: str, timeout_s: float, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.ask, step, **arguments)

    def ask(self, step: str, **arguments: Any) -> Any:
        self._connection.send((step, arguments))
        return self._connection.recv()

    async def set_version(self, version: int, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        self._connection.close()
        await asyncio.to_thread(self._process.join)


class ReceiverEngine(ReplicatedEngine):
    """Takes any weights."""

    dtype = "float32"
    max_length = 0

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(recovery_timeout_s=TIMEOUT_S, health_every_s=TIMEOUT_S)
        self.replica = ProcessReplica()
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.start_with([self.replica])

    def _make_replicas(self, model_dir: Path) -> list[Replica]:
        return [self.replica]
