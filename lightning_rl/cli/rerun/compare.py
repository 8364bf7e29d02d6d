"""Repeats an iteration, and reports where it first differs from the recorded one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback

from lightning_rl.callbacks.rerun_recorder import environment_of
from lightning_rl.cli.rerun.rebuild import Remade, remade
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.data.rollouts.log import Outcome, first_difference

SHOWN = ("policy/loss", "policy/grad_norm", "policy/entropy", "value/loss")


@dataclass(frozen=True)
class IterationRerun:
    """The results of iteration ``again.version``: ``recorded``, and trained ``again``.

    It was trained again from ``kept``. ``diverged_at`` is the first version whose weights have
    other checksums than recorded, and ``checkpoint_differs`` the first entry that differs from the
    checkpoint saved after it ("" if none does, None if there is no such checkpoint).
    ``environment`` describes where it was trained again.
    """

    kept: KeptWeights
    recorded: Outcome
    again: Outcome
    diverged_at: int | None
    checkpoint: KeptWeights | None
    checkpoint_differs: str | None
    environment: dict[str, Any]

    @property
    def equal(self) -> bool:
        """True if loss, gradient norm, other metrics of the update, and weights are equal."""
        return not self.differing and self.diverged_at is None and not self.checkpoint_differs

    @property
    def differing(self) -> list[str]:
        """Names of the metrics of the update that differ, or were not recorded."""
        was, again = self.recorded.metrics, self.again.metrics
        return [k for k, now in again.items() if k not in was or not identical(was[k], now)]

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        iteration = self.recorded.version
        lines = [f"iteration {iteration}, from {self.kept.lead_to(iteration - 1)}"]
        metrics = self.again.metrics
        for name in (n for n in SHOWN if n in metrics):
            was, now = self.recorded.metrics.get(name, float("nan")), metrics[name]
            verdict = "equal" if identical(was, now) else f"differs by {abs(was - now):.2g}"
            lines.append(f"  {name:<18} recorded {was!r:<24} again {now!r:<24} {verdict}")
        others = [n for n in metrics if n not in SHOWN]
        differ = [n for n in self.differing if n not in SHOWN]
        verdict = "equal" if not differ else f"{len(differ)} differ, first {differ[0]}"
        lines.append(f"  {len(others)} more metrics    {verdict}")
        lines.append(f"  {len(self.again.weights)} weight tensors  {self._weights()}")
        if self.checkpoint is not None:
            differs = self.checkpoint_differs
            verdict = f"{differs} differs" if differs else "equal"
            lines.append(f"  {self.checkpoint}  weights and optimizer: {verdict}")
        lines.append("equal" if self.equal else "different")
        return lines

    def _weights(self) -> str:
        if self.diverged_at is None:
            return "equal"
        if self.diverged_at == self.kept.version:
            return f"differ from the start: {self.kept} changed since the run"
        name = first_difference(self.recorded.weights, self.again.weights)
        return f"differ since version {self.diverged_at}, now first in {name}"


def rerun_iteration(
    run: RecordedRun,
    iteration: int,
    since: int | None = None,
    observers: Sequence[Callback] = (),
) -> IterationRerun:
    """Train iteration ``iteration`` again on its recorded rollouts, from the nearest weights kept.

    Args:
        run: the recorded run.
        iteration: its number, from 1; its rollouts and metrics must be recorded.
        since: start from the kept weights of this version; None: the nearest.
        observers: callbacks that watch the training.

    Raises:
        ConfigError: if the run's configuration does not work here.
        DataError: if the run kept too little.
    """
    recorded = run.outcomes_with(iteration)
    with remade(run, iteration, iteration - 1, since, observers) as made:
        checkpoint = next((k for k in run.kept if k.version == iteration), None)
        if not made.trainer.is_global_zero:  # which gathers what is sharded
            checkpoint = None
        return IterationRerun(
            made.kept,
            recorded[iteration],
            made.outcomes[iteration],
            made.diverged_at(recorded),
            checkpoint,
            None if checkpoint is None else _compared(checkpoint.load(), made),
            environment_of(made.trainer),
        )


def _compared(checkpoint: dict[str, Any], made: Remade) -> str:
    """Return the first entry that is not equal bit by bit; "" if all are."""
    state = made.checkpoint["state_dict"]
    for name, weight in checkpoint["state_dict"].items():
        if name not in state or not torch.equal(weight, state[name].cpu()):
            return str(name)
    states = (checkpoint["optimizer_states"], made.checkpoint["optimizer_states"])
    for kept, optimizer in zip(*states, strict=True):
        for parameter, values in kept["state"].items():
            for name, value in values.items():
                now = optimizer["state"][parameter][name]
                if not torch.equal(torch.as_tensor(value), torch.as_tensor(now).cpu()):
                    return f"{name} of the optimizer's parameter {parameter}"
    return ""


CLOSE = 1e-3
"""Tolerance of metrics, relative to the larger value, for rounding on another machine."""
NEAR_ZERO = 1e-4
"""Absolute tolerance of metrics that are zero but for rounding, such as logprob gaps in nats."""


def within_rounding(was: float, now: float) -> bool:
    """Return True if a metric differs by no more than rounding on another machine explains."""
    return identical(was, now) or math.isclose(was, now, rel_tol=CLOSE, abs_tol=NEAR_ZERO)


def identical(was: float, now: float) -> bool:
    """Return True for equal numbers, and for NaN both times: the same update gives it again."""
    return was == now or (math.isnan(was) and math.isnan(now))
