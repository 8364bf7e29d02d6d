"""Formulas: seconds of decoding, scoring and training, from a model's shape and the constants."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.scaling_simulated.constants import Constants, Model


@dataclass(frozen=True)
class Lengths:
    """What costs depend on: means over rollouts of their tokens, and of these squared."""

    mean: float
    square: float

    @classmethod
    def of(cls, lengths: Sequence[float]) -> "Lengths":
        count = len(lengths)
        return cls(sum(lengths) / count, sum(length**2 for length in lengths) / count)

    @property
    def context(self) -> float:
        """Tokens before a token, on average over tokens."""
        return self.square / (2 * self.mean)


def ring_seconds(c: Constants, size: float, ranks: int) -> float:
    """All-gather or reduce-scatter of ``size`` bytes over so many ranks: each sends all but its
    own part, in ``ranks - 1`` steps. Nothing on one rank.
    """
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    return c.launch + (ranks - 1) * c.hop + share * size / c.link(ranks)


@dataclass(frozen=True)
class Replica:
    """An engine on ``gpus`` GPUs (tensor parallel), which decodes rollouts of such lengths."""

    c: Constants
    model: Model
    gpus: int
    lengths: Lengths

    @classmethod
    def smallest(cls, c: Constants, model: Model, lengths: Lengths) -> "Replica":
        """On as few GPUs as leave a sixth of the engine's memory for keys and values."""
        gpus = 1
        while c.engine_bytes * model.parameters / gpus > 5 / 6 * c.memory_share * c.memory:
            gpus *= 2
        return cls(c, model, gpus, lengths)

    @cached_property
    def context(self) -> float:
        """Tokens that a decoded one attends to, on average."""
        return self.c.prompt + self.lengths.context

    @property
    def cache_bytes(self) -> float:
        """Of a request's keys and values, on average."""
        return self.context * 2 * self.model.layers * self.model.kv_heads * self.model.head_size * 2

    @cached_property
    def slots(self) -> int:
        """Requests that run at the same time: as many as the cache holds, 256 at most."""
        c = self.c
        free = self.gpus * c.memory_share * c.memory - c.engine_bytes * self.model.parameters
        return max(1, min(256, int(free / self.cache_bytes)))

    def weights_read(self, running: float) -> float:
        """Bytes that a step reads: of experts those to which one of the tokens goes.

        A token leaves out an expert with probability 1 - active / all, independently.
        """
        m = self.model
        read = float(m.active)
        if m.experts:
            touched = m.experts * (1 - (1 - m.active_experts / m.experts) ** running)
            read += m.layers * m.expert * (touched - m.active_experts)
        return self.c.engine_bytes * read

    def step(self, running: float) -> float:
        """Seconds in which each of ``running`` requests gets a token.

        Memory bounds it: weights once, and each request's keys and values; or products do.
        """
        c, m = self.c, self.model
        read = self.weights_read(running) + running * self.cache_bytes
        attention = 4 * m.layers * m.heads * m.head_size * self.context
        products = running * (2 * m.active + attention)
        memory = read / (self.gpus * c.hbm * c.hbm_share)
        compute = products / (self.gpus * c.flops * c.decode_share)
        reduce = 2 * m.layers * c.decode_reduce if self.gpus > 1 else 0.0
        return c.decode_step + running * c.decode_request + reduce + max(memory, compute)

    @cached_property
    def best(self) -> float:
        """Least seconds per token: all slots run."""
        return self.step(self.slots) / self.slots

    def reread(self, running: float) -> float:
        """Seconds of reading so many contexts anew, whose keys and values a push made stale."""
        m = self.model
        products = 2 * m.active + 2 * m.layers * m.heads * m.head_size * self.context
        rate = self.gpus * self.c.flops * self.c.prefill_share
        return running * self.context * products / rate


@dataclass(frozen=True)
class Trainer:
    """FSDP over ``gpus`` GPUs; a group stays on one rank, so beyond one each, ranks share packs."""

    c: Constants
    model: Model
    gpus: int
    lengths: Lengths

    @property
    def needed(self) -> int:
        """GPUs that hold weights, gradients and the optimizer's state in 3/4 of their memory."""
        return math.ceil(self.c.state_bytes * self.model.parameters / (0.75 * self.c.memory))

    def sharing(self, groups: int) -> int:
        """Ranks that compute each pack together (sequence parallel)."""
        return max(1, -(-self.gpus // groups))

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: 6 per weight, and causal attention's products with its context."""
        m = self.model
        attention = 12 * m.layers * m.heads * m.head_size * self.lengths.context
        return 6 * m.active + attention

    def compute(self, tokens: float) -> float:
        """Seconds of forward and backward, when all GPUs have the same to do."""
        share = self.c.mfu_experts if self.model.experts else self.c.mfu
        return tokens * self.flops_per_token / (self.gpus * self.c.flops * share)

    def packs(self, tokens: float, sharing: int) -> int:
        """Passes over the model that a rank takes part in."""
        return max(1, math.ceil(tokens * sharing / (self.gpus * self.c.pack)))

    def layers(self, size: float) -> float:
        """Seconds of a collective of each layer, of ``size`` bytes all together."""
        return self.model.layers * ring_seconds(self.c, size / self.model.layers, self.gpus)

    def gather(self) -> float:
        """Seconds of gathering all layers in bfloat16, one by one."""
        return self.layers(2 * self.model.parameters)

    def exchange(self, tokens: float, sharing: int) -> float:
        """Seconds of one pass's all-to-alls: a rank sends its heads of q, k, v, and o's back."""
        if sharing == 1:
            return 0.0
        m, c = self.model, self.c
        width = 2 * m.head_size * (m.heads + m.kv_heads)
        sent = tokens / self.gpus * width * 2 * (sharing - 1) / sharing
        return m.layers * (4 * c.launch + sent / c.link(sharing))

    def train(self, tokens: float, groups: int, imbalance: float = 1.0) -> float:
        """Seconds of an update: FSDP gathers twice and reduces float32 gradients once per pack,
        behind the computing as far as that lasts; ``imbalance``: the fullest rank's share over the
        mean.
        """
        sharing = self.sharing(groups)
        gradients = self.layers(self.c.master_bytes * self.model.parameters)
        behind = self.packs(tokens, sharing) * (2 * self.gather() + gradients)
        computing = imbalance * (self.compute(tokens) + 3 * self.exchange(tokens, sharing))
        return max(computing, behind) + self.optimizer

    def score(self, tokens: float, groups: int, imbalance: float = 1.0) -> float:
        """Seconds of a forward pass alone, a third of the products, which gathers once per pack."""
        sharing = self.sharing(groups)
        behind = self.packs(tokens, sharing) * self.gather()
        computing = imbalance * (self.compute(tokens) / 3 + self.exchange(tokens, sharing))
        return max(computing, behind)

    @property
    def optimizer(self) -> float:
        """Seconds of a step: state is read and written once."""
        size = 2 * self.c.state_bytes * self.model.parameters / self.gpus
        return size / (self.c.hbm * self.c.hbm_share)
