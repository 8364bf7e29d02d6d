"""The symptom of an update: what is wrong with it, and whether a smaller update still shows it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from lightning_rl.cli.pack.observation import (
    BatchRow,
    Observation,
    Update,
    compared_column,
    first_fault,
    place_in,
)
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import DataError

EXPLODING = 10.0
"""A gradient explodes if its norm is more than this many times the run's median norm."""
_NORM = "policy/grad_norm"
_OF_ROLLOUTS = (
    "rollout_logprobs",
    "old_logprobs",
    "trainer_logprobs",
    "ref_logprobs",
    "values",
    "token_rewards",
)
"""Columns in which the numbers of a rollout do not depend on other rollouts."""


class Symptom(ABC):
    """A fault that an update shows; ``text`` describes it."""

    text: str
    needs_layers = False
    """True if it cannot be told from an update with fewer layers."""

    @abstractmethod
    def shows(self, update: Update) -> bool:
        """Return True if an update with fewer rollouts or layers shows it, too."""

    def expected(self, update: Update) -> Observation:
        """Return the observation to pack with such an update."""
        return update.seen


def median_norm(outcomes: Iterable[Outcome]) -> float | None:
    """Return the median of the finite gradient norms that a run recorded; None without any."""
    norms = (outcome.metrics.get(_NORM, math.nan) for outcome in outcomes)
    finite = [norm for norm in norms if math.isfinite(norm)]
    return median(finite) if finite else None


def own_symptom(update: Update, usual: float | None, factor: float = EXPLODING) -> Symptom | None:
    """Return the symptom that an update shows by itself; None if it shows none.

    Args:
        update: the update.
        usual: the run's median norm of a gradient; None: it is not known.
        factor: a gradient explodes if its norm is more than so many times the median.
    """
    if stages := not_finite(update):
        return NotFinite(stages)
    norm = update.rerun.again.metrics.get(_NORM, math.nan)
    if usual is not None and norm > factor * usual:
        return Exploding(norm, usual)
    return None


def not_finite(update: Update) -> dict[str, str]:
    """Return the stages in which an update has a NaN or an infinity, and where it is there first.

    They are in the order in which they arise: columns, loss, gradient, weights.
    """
    seen, found = update.seen, dict[str, str]()
    for name, column in seen.columns.items():
        bad = ~column.isfinite()
        if bad.any() and not name.endswith("teacher_logprobs"):  # NaN: no teacher has looked
            rows = update.observer.rows[name.rpartition(".")[0]]
            found[f"column {name}"] = f"column {name}, {place_in(rows, int(bad.int().argmax()))}"
    for name, value in update.rerun.again.metrics.items():
        if name.endswith("/loss") and not math.isfinite(value):
            found.setdefault("loss", f"metric {name}")
    for step, norms in enumerate(seen.gradients, 1):
        if (tensor := _first(norms)) is not None:
            found.setdefault("gradient", f"gradient of {tensor} in optimizer step {step}")
    if (tensor := _first(seen.changes)) is not None:
        found["weights"] = f"change of {tensor}"
    return found


def _first(norms: dict[str, float]) -> str | None:
    return next((name for name, norm in norms.items() if not math.isfinite(norm)), None)


class NotFinite(Symptom):
    """Something is NaN or infinite. What has to stay is the last of the stages, which matters.

    Args:
        stages: as :func:`not_finite` returns them.
    """

    def __init__(self, stages: dict[str, str]) -> None:
        self.text = f"not finite: {'; then '.join(stages.values())}"
        self._last = list(stages)[-1]

    def shows(self, update: Update) -> bool:
        return self._last in not_finite(update)


class Exploding(Symptom):
    """The gradient's norm, before clipping, is many times as large as usual.

    Fewer rollouts have a larger gradient in any case, since less noise is averaged. So the norm has
    to stay as large as that of the whole update, which a single extreme rollout of many surpasses.
    """

    def __init__(self, norm: float, usual: float) -> None:
        self.text = f"exploding gradient: norm {norm:.3g}, while the run's median is {usual:.3g}"
        self._norm = norm

    def shows(self, update: Update) -> bool:
        return self._norm <= update.rerun.again.metrics.get(_NORM, math.nan) < math.inf


class Difference(Symptom):
    """A column of the batch differs from the packed one by more than rounding.

    The other machine's numbers are known for whole rollouts of this model, so it has to be a
    column in which a rollout's numbers depend on no other rollout, and all layers have to stay.
    Rollouts without any advantage do not count, since an update may not score them.

    Args:
        packed: what the pack expects.
        update: the update of all rollouts.

    Raises:
        DataError: if they do not differ, or first in another stage.
    """

    needs_layers = True

    def __init__(self, packed: Observation, update: Update) -> None:
        fault = first_fault(packed, update.seen, update.rerun)
        if fault is None:
            raise DataError(
                "the update has no symptom: everything is finite, the gradient's norm is as usual, "
                "and it is as packed; so there is nothing to shrink"
            )
        name = fault.name.removeprefix("column ")
        self._policy, _, key = name.rpartition(".")
        if fault.token is None or key not in _OF_ROLLOUTS:
            raise DataError(
                f"the update first differs in {fault.name}, and what the other machine would have "
                "got there for fewer rollouts is not known; send the whole pack"
            )
        self.text = f"different: {fault.name}"
        self._name, self._packed, self._whole = name, packed, update
        if not self.shows(update):
            raise DataError(
                f"{fault.name} differs only in rollouts without an advantage, so the pack cannot "
                "be shrunk; send the whole pack"
            )

    def shows(self, update: Update) -> bool:
        there, here = self._shared(update)
        now = update.seen.columns[self._name][here]
        return not compared_column(self._name, self._packed.columns[self._name][there], now).near

    def expected(self, update: Update) -> Observation:
        """Return what was observed, but with the packed numbers in the column that differs."""
        there, here = self._shared(update)
        column = update.seen.columns[self._name].clone()
        column[here] = self._packed.columns[self._name][there]
        return replace(update.seen, columns=update.seen.columns | {self._name: column})

    def _shared(self, update: Update) -> tuple[Tensor, Tensor]:
        """Return flags of the tokens, (T,) of the whole and of a smaller update, that count."""
        count = self._live(self._whole) & self._live(update)
        whole, rows = (one.observer.rows[self._policy] for one in (self._whole, update))
        return _tokens_of(count, whole), _tokens_of(count, rows)

    def _live(self, update: Update) -> set[str]:
        """Return the rollouts that have an advantage."""
        rows = update.observer.rows[self._policy]
        name = f"{self._policy}.advantages" if self._policy else "advantages"
        parts = update.seen.columns[name].split([row.length for row in rows])
        return {row.rollout for row, part in zip(rows, parts, strict=True) if part.any()}


def _tokens_of(rollouts: set[str], rows: Sequence[BatchRow]) -> Tensor:
    """Return flags, (T,), of the tokens of these rollouts."""
    flags = torch.tensor([row.rollout in rollouts for row in rows])
    return flags.repeat_interleave(torch.tensor([row.length for row in rows]))
