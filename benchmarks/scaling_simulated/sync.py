"""Formulas: seconds of a push by each of this library's transports.

Each follows what the transport does, step by step; `lightning_rl/sync` is the source. Trainer ranks
gather a weight at a time, in float32; rank 0 stages buckets and sends each replica all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.scaling_simulated.constants import Constants, Model
from benchmarks.scaling_simulated.costs import ring_seconds


@dataclass(frozen=True)
class Push:
    """From a trainer of ``ranks`` GPUs to ``replicas`` engines of ``gpus`` GPUs each.

    ``outlet``: bytes per second of rank 0's link to them; None: of its network card.
    """

    c: Constants
    model: Model
    ranks: int
    replicas: int
    gpus: int
    outlet: float | None = None

    @property
    def size(self) -> float:
        """Bytes of the engine's weights."""
        return self.c.engine_bytes * self.model.parameters

    @property
    def buckets(self) -> int:
        return max(1, round(self.size / self.c.bucket))

    @property
    def gather(self) -> float:
        """Seconds of ``full_tensor`` of each of the trainer's tensors, one after the other."""
        count = self.model.gathers
        each = self.c.master_bytes * self.model.parameters / count
        return count * ring_seconds(self.c, each, self.ranks)

    @property
    def host(self) -> float:
        """Seconds in which rank 0 copies tensor after tensor into buckets."""
        return self.model.tensors * self.c.stage_tensor

    @property
    def load(self) -> float:
        """Seconds in which an engine's loader takes all tensors: each worker looks at each of them,
        and writes its part twice (vLLM loads a layer anew, and then copies it in place).
        """
        written = 4 * self.size / self.gpus / (self.c.hbm * self.c.hbm_share)
        return self.model.tensors * self.c.load_tensor + written

    @property
    def sending_rate(self) -> float:
        """Bytes per second that leave rank 0."""
        return self.c.link_share * (self.outlet or self.c.network)


def staged(c: Constants, buckets: int, stage: float, deliver: float) -> float:
    """Seconds of so many buckets: one is staged while the one before is sent and loaded."""
    return c.push + (stage + deliver + (buckets - 1) * max(stage, deliver)) / buckets


def broadcast(push: Push) -> float:
    """Each replica has a group of its own, so rank 0's card sends each bucket once per replica, as
    ``CollectiveTransport`` does to a single one, or after a loss. With ``keep_copy`` a bucket also
    goes to the host's memory. The next bucket is told when all have loaded this one.
    """
    c = push.c
    stage = push.gather + push.host + push.size / (c.pcie * c.pcie_share)
    sent = push.replicas * push.size / push.sending_rate
    deliver = push.buckets * (c.call + c.launch) + sent + push.load
    return staged(c, push.buckets, stage, deliver)


def shared_broadcast(push: Push) -> float:
    """``CollectiveTransport``: all are in one group, and pass a bucket on along a chain."""
    passing = push.buckets * push.replicas * push.gpus * push.c.hop
    return broadcast(replace(push, replicas=1)) + passing


def over_ethernet(push: Push) -> float:
    """:func:`broadcast`, where only Ethernet leads to the engines."""
    return broadcast(replace(push, outlet=push.c.ethernet))


def changed_only(push: Push) -> float:
    """:func:`broadcast` with ``changed_only``: what was sent last comes back from the host's
    memory, each tensor is compared with it, and modules in which any weight differs are loaded. A
    bucket with one of them travels whole; all of a layer's experts are one module.
    ``trained_share`` of the modules differ; where all weights are trained, all do, and it only adds
    the comparing.
    """
    c, share = push.c, push.c.trained_share
    comparing = push.model.tensors * c.launch + 2 * push.size / (c.hbm * c.hbm_share)
    stage = push.gather + push.host + 2 * push.size / (c.pcie * c.pcie_share) + comparing
    sent = push.replicas * push.size / push.sending_rate
    deliver = share * (push.buckets * (c.call + c.launch) + sent + push.load)
    return staged(c, push.buckets, stage, deliver)


def adapters_apart(push: Push) -> float:
    """Adapters alone, in float32, to an engine that keeps a LoRA beside its base."""
    c, m = push.c, push.model
    size, tensors = c.master_bytes * m.adapters(c.lora_rank), 2 * m.adapted_tensors
    gather = tensors * ring_seconds(c, size / tensors, push.ranks)
    host = tensors * (c.stage_tensor + c.load_tensor)
    return c.push + gather + host + c.call + push.replicas * size / push.sending_rate


def adapters_merged(push: Push) -> float:
    """``adapters_only``, where engines merge: each worker brings all that is adapted of the base
    from the host's memory, which is not locked, and loads it.
    """
    c, m = push.c, push.model
    size = c.engine_bytes * m.adapted
    written = 4 * size / push.gpus / (c.hbm * c.hbm_share)
    loading = m.adapted_tensors * c.load_tensor + written
    return adapters_apart(push) + size / c.pageable + loading


def checkpoint(push: Push) -> float:
    """``CheckpointTransport``: rank 0 gathers and writes a file tensor by tensor, then the nodes of
    the engines read it; each worker copies all of it to its GPU.
    """
    c = push.c
    write = push.gather + push.host + push.size / c.pageable + push.size / c.disk_write
    nodes = max(1, push.replicas * push.gpus // c.node)
    read = push.size * max(1 / c.disk_read, nodes / c.disk_total)
    return c.push + c.call + write + read + push.size / c.pageable + push.load


def in_process(push: Push) -> float:
    """To an engine in each trainer's process: weights are gathered by all, and loaded by all."""
    return push.gather + push.host + push.load


TRANSPORTS: dict[str, Callable[[Push], float]] = {
    "collective": broadcast,
    "collective over Ethernet": over_ethernet,
    "collective, changed_only": changed_only,
    "collective, adapters_only": adapters_merged,
    "adapters beside their base": adapters_apart,
    "checkpoint": checkpoint,
    "in process": in_process,
    "shared collective": shared_broadcast,
}
