"""Tells if a GPU has enough memory for a training process and the engine beside it."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_rl.cli.check.memory import REWARDS, STAYS, MemoryPlan, in_units


@dataclass(frozen=True)
class CardPlan:
    """A training process and everything else on its GPU; all in bytes.

    ``engine`` is the engine's memory on this GPU, and ``at_start`` what must be free when it
    starts, in addition to weights and other models; ``push_buffers`` are those from which rank 0
    sends weights. An engine that ``sleeps`` takes nothing during updates, but needs as much in each
    iteration as at its start, when the optimizer's state is there, too.
    """

    card: int
    training: MemoryPlan
    engine: int = 0
    at_start: int = 0
    push_buffers: int = 0
    sleeps: bool = False

    @property
    def missing(self) -> int:
        """Bytes that the GPU lacks; 0 or less: it fits."""
        asleep = ("optimizer", "master weights") if self.sleeps else ()
        stays = self.training.sum_of("weights", "other models", *asleep)
        needed = self.training.total + self.engine + self.push_buffers
        return max(needed, stays + self.at_start) - self.card

    @property
    def verdict(self) -> str:
        """The memory that is needed, and whether it fits."""
        parts = {
            "training": self.training.total,
            "engine": self.engine,
            "engine in turn": self.at_start if self.sleeps else 0,
            "buffers of a push": self.push_buffers,
        }
        together = " + ".join(f"{in_units(size)} {name}" for name, size in parts.items() if size)
        if self.missing <= 0:
            return f"{together}: fits, {in_units(-self.missing)} to spare"
        return f"{together}: DOES NOT FIT, {in_units(self.missing)} too much"

    def lines(self) -> Iterator[str]:
        """Yield lines of text for the user."""
        verdict = f"GPU of {in_units(self.card)}: {self.verdict}"
        yield verdict if self.missing <= 0 else f"{verdict}; {self.advice}"

    @property
    def advice(self) -> str:
        """A suggestion for the largest part that can be made smaller."""
        state = self.training.sum_of(*STAYS)
        engine = self.at_start if self.sleeps else self.engine
        sleeping = "" if self.sleeps else ", or let it sleep during updates (sleep_level)"
        rewards = self.training.sum_of(REWARDS)
        serve = "serve the models of rewards (ServedTeacher, ServedReward), or set their device"
        sizes = {
            self.training.advice.state: state - rewards,
            serve: rewards,
            self.training.advice.activations: self.training.total - state,
            f"lower the engine's gpu_memory_utilization or kv_cache_gb{sleeping}": engine,
        }
        return max(sizes, key=lambda advice: sizes[advice])
