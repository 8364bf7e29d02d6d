"""Provide replicas that are threads: the real receivers of vLLM's workers, without vLLM."""

import asyncio

import torch

from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.replicas.replica import Replica, ReplicaLost
from lightning_rl.engines.replicas.replicated import ReplicatedEngine
from lightning_rl.engines.sampling import Completion
from lightning_rl.errors import ReplicaError, SyncTimeoutError, WeightSyncError
from lightning_rl.run.digest import digests
from lightning_rl.sync.adapters import Merger
from lightning_rl.sync.stream import receiver_of


class ThreadReplica(Replica):
    """Loads weights into a dict, through the receivers that vLLM's workers use."""

    can_restart = True

    def __init__(self, name):
        super().__init__(name, "127.0.0.1")
        self.held, self.receiver, self.buckets, self.said = {}, None, [], "default"
        self.generated, self.dies_at, self.starts = 0, None, True
        self.cut_off, self.paused, self.refuses = False, False, None

    async def start(self):
        if not self.starts or self.cut_off:
            raise ReplicaError(f"{self.name} does not start")
        self.life += 1
        self.held = {}
        if self.receiver is not None:
            self.receiver.close()
        self.gone.clear()

    async def answers(self):
        return True

    async def generate(self, token_ids, sampling, seed):
        self.generated += 1
        await asyncio.sleep(0)
        if self.dies_at == "generate":
            self.dies_at = None
            raise ReplicaLost(f"{self.name} died")
        return Completion([seed], [0.0], "length", [self.version])

    async def pause(self):
        self.paused = True

    async def resume(self):
        self.paused = False

    async def transfer(self, step, timeout_s, **arguments):
        if self.dies_at == step:
            self.dies_at = None
            raise ReplicaLost(f"{self.name} died")
        if self.refuses == step:
            raise WeightSyncError(f"{self.name} refuses")
        if self.cut_off and step == "update_weights":
            raise SyncTimeoutError(f"{self.name} did not answer within {timeout_s:g} s")
        return await asyncio.to_thread(getattr(self, step), **arguments)

    def init_weight_transfer_engine(self, init_info):
        transport, options = init_info["transport"], init_info["options"]
        self.receiver = receiver_of(transport, torch.device("cpu"), 0, **options)
        self.merger = Merger(torch.device("cpu"))

    def start_weight_update(self):
        self.buckets, self.received = [], 0
        self.merger.begin()

    def update_weights(self, update_info):
        if (bucket := update_info["bucket"]) is None:
            self.merger.finish()
            return
        arrived = list(self.receiver.fetch(bucket))
        self.received += sum(weight.nbytes for _, weight in arrived)
        taken = self.merger.take(arrived, update_info["complete"])
        weights = {name: weight.clone() for name, weight in taken}
        self.buckets.append(sorted(weights))
        self.held |= weights

    async def set_version(self, version, timeout_s):
        self.said = str(version)

    async def held_digests(self, names):
        return [HeldDigests(self.name, digests((n, w) for n, w in self.held.items() if n in names))]

    async def close(self):
        self.gone.set()


class ThreadEngine(ReplicatedEngine):
    dtype = "float32"
    max_length = 128

    def __init__(self, count=2, recovery_timeout_s=20.0):
        super().__init__(recovery_timeout_s, health_every_s=60.0)
        self.count = count

    def _make_replicas(self, model_dir):
        return [ThreadReplica(f"replica {i}") for i in range(self.count)]


def holds(replica, weights) -> bool:
    return replica.held.keys() == weights.keys() and all(
        torch.equal(replica.held[name], weight) for name, weight in weights.items()
    )


def halved(weights):
    return {name: weight / 2 for name, weight in weights.items()}


async def lose(engine, replica):
    """Lose a replica as when a request finds it dead; call this in the engine's loop."""
    engine.lost(replica, ReplicaLost("injected"))
