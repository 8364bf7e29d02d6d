"""GroupSelection: the groups of a batch that filters keep, and what replaces those they reject."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.collect.collector import GroupFilter
from lightning_rl.collect.pipeline import GroupSource
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import FilterError, require_at_least, require_finite
from lightning_rl.rollout import Group, Rollout, RolloutStatus


@configurable
@dataclass(frozen=True)
class GroupSelection:
    """Which groups are trained on, and what replaces the others.

    Args:
        filters: groups rejected by any of them are replaced by groups of new prompts (DAPO's
            dynamic sampling).
        max_batches: at most this many times ``groups_per_iteration`` groups are generated for one
            batch, after which the run stops.
        seconds: no replacement begins later than this many seconds after the batch; None: no limit.
        fill_with_rejected: when nothing more may be generated, fill the batch with the groups that
            filters rejected last, instead of stopping the run. Replacements still being generated
            after ``seconds`` are evicted.

    Raises:
        ConfigError: for values out of range.
    """

    filters: list[GroupFilter] | None = None
    max_batches: int = 40
    seconds: float | None = None
    fill_with_rejected: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, **{"selection.max_batches": self.max_batches})
        require_finite(**{"selection.seconds": self.seconds})
        require_at_least(0, **{"selection.seconds": self.seconds})


def as_selection(given: Any) -> Any:
    """Convert filters to a selection by them; return anything else unchanged."""
    if isinstance(given, GroupFilter):
        return GroupSelection([given])
    return GroupSelection(list(given)) if isinstance(given, list | tuple) else given


class SelectedGroups:
    """Fills a batch with groups that all filters keep; tells collectors when to replace others.

    Attributes describe the present batch: all groups ``taken`` from the collector, those ``kept``,
    how many each filter ``rejected``, and how many of these were ``made_up``, which means kept for
    lack of others.

    Args:
        source: its ``num_groups`` is the size of the batch.
        selection: the filters, and the limits of replacing what they reject.
    """

    def __init__(self, source: GroupSource, selection: GroupSelection) -> None:
        self.source = source
        self.settings = selection
        self.filters = selection.filters or []
        self._warned = False
        self._clock: Callable[[], float] = time.monotonic
        self.clear()

    def clear(self) -> None:
        """Forget the last batch."""
        self.taken: list[Group] = []
        self.kept: list[Group] = []
        self.rejected: Counter[str] = Counter()
        self.made_up = 0
        self._set_aside: list[tuple[Group, list[Rollout]]] = []
        self._verdicts: dict[str, GroupFilter | None] = {}
        self._end = math.inf

    def rounds(self, clock: Callable[[], float]) -> Iterator[tuple[int, float]]:
        """Yield how many groups are missing, and the seconds to take them in; :meth:`add` them.

        At the end ``source.num_groups`` groups are kept.

        Raises:
            FilterError: if they are not, and ``fill_with_rejected`` is not set.
        """
        seconds = math.inf if self.settings.seconds is None else self.settings.seconds
        self._clock, self._end = clock, clock() + seconds
        while missing := self.source.num_groups - len(self.kept):
            if self.taken and not self.may_refill(0):
                self._make_up(missing)
                return
            # What the first round generates is the rest to train on.
            yield missing, self.seconds_to_evict() if self.taken else math.inf

    # What a collector asks, as its ``refill``.

    def rejects(self, group: Group) -> bool:
        graded = all(r.reward is not None for r in group if r.completed and r.trained)
        return graded and self.verdict(group) is not None

    def may_refill(self, drawn: int) -> bool:
        within = len(self.taken) + drawn < self.settings.max_batches * self.source.num_groups
        return within and self._clock() < self._end

    def seconds_to_evict(self) -> float:
        return self._end - self._clock() if self.settings.fill_with_rejected else math.inf

    def verdict(self, group: Group) -> GroupFilter | None:
        """Return the first filter that rejects a graded group, asking each at most once."""
        name = group[0].group_id
        if name not in self._verdicts:
            self._verdicts[name] = next((f for f in self.filters if not f.keep(group)), None)
        return self._verdicts[name]

    def add(self, groups: Sequence[Group]) -> None:
        """Keep graded groups, or mark their rollouts SKIPPED and note which filter did so."""
        self.taken += groups
        for group in groups:
            if (group_filter := self.verdict(group)) is None:
                self.kept.append(group)
                continue
            self.rejected[type(group_filter).__name__] += 1
            completed = [rollout for rollout in group if rollout.completed]
            self._set_aside.append((group, completed))
            for rollout in completed:
                rollout.status = RolloutStatus.SKIPPED

    def _make_up(self, missing: int) -> None:
        """Fill the batch with the groups rejected last, if ``fill_with_rejected`` is set."""
        if not self.settings.fill_with_rejected:
            raise FilterError(
                f"of {len(self.taken)} groups generated only {len(self.kept)} of "
                f"groups_per_iteration={self.source.num_groups} groups passed the filters "
                f"({self.tell()}): the prompts are exhausted, too easy or too hard; raise "
                "selection.max_batches (or seconds), change the prompts, drop the filter, or set "
                "selection.fill_with_rejected: true"
            )
        for group, completed in self._set_aside[-missing:]:
            for rollout in completed:
                rollout.status = RolloutStatus.COMPLETED
            self.kept.append(group)
        self.made_up = missing
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{missing} of groups_per_iteration={self.source.num_groups} groups are ones that "
                f"filters rejected ({self.tell()}), because selection.max_batches or seconds left "
                "no time for others; raise them, or change the prompts or filters. The metric "
                "filter/made_up has their number in every iteration",
                stacklevel=2,
            )

    def tell(self) -> str:
        """Say in words which filter rejected how many groups."""
        parts = (f"{name} rejected {count}" for name, count in self.rejected.items())
        return ", ".join(parts) or "none was rejected"

    def metrics(self) -> dict[str, float]:
        """Return how many groups each filter rejected, and how many were made up."""
        metrics = {f"filter/{name}": float(n) for name, n in self.rejected.items()}
        if self.settings.fill_with_rejected:
            metrics["filter/made_up"] = float(self.made_up)
        return metrics
