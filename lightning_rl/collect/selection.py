"""GroupSelection: the groups of a batch that filters keep, and what replaces those they reject."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lightning_rl.collect.collector import GroupFilter
from lightning_rl.collect.pipeline import GroupSource
from lightning_rl.errors import FilterError
from lightning_rl.rollout import Group, Rollout, RolloutStatus


class GroupSelection:
    """Fills a batch with groups that all filters keep; tells collectors when to replace others.

    Attributes describe the present batch: all groups ``taken`` from the collector, those ``kept``,
    how many each filter ``rejected``, and how many of these were ``made_up``, which means kept for
    lack of others.

    Args:
        source: its ``num_groups`` is the size of the batch.
        filters: each keeps or rejects a graded group.
        max_rounds: draw at most ``max_rounds * num_groups`` groups per batch.
        refill_seconds: issue no further groups for a batch after so many seconds.
        train_on_rest: groups that are still missing then are made up by the last rejected ones, in
            place of an error.
    """

    def __init__(
        self,
        source: GroupSource,
        filters: Sequence[GroupFilter] = (),
        max_rounds: int = 1,
        refill_seconds: float = math.inf,
        train_on_rest: bool = False,
    ) -> None:
        self.source = source
        self.filters = filters
        self.max_rounds = max_rounds
        self.refill_seconds = refill_seconds
        self.train_on_rest = train_on_rest
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
            FilterError: if they are not, and ``train_on_rest`` is not set.
        """
        self._clock, self._end = clock, clock() + self.refill_seconds
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
        within = len(self.taken) + drawn < self.max_rounds * self.source.num_groups
        return within and self._clock() < self._end

    def seconds_to_evict(self) -> float:
        return self._end - self._clock() if self.train_on_rest else math.inf

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
        """Fill the batch with the groups rejected last, if ``train_on_rest`` is set."""
        if not self.train_on_rest:
            raise FilterError(
                f"of {len(self.taken)} groups generated only {len(self.kept)} of "
                f"groups_per_iteration={self.source.num_groups} groups passed the filters "
                f"({self.tell()}): the prompts are exhausted, too easy or too hard; raise "
                "max_rounds (or refill_seconds), change the prompts, drop the filter, or set "
                "train_on_rest: true"
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
                f"filters rejected ({self.tell()}), because max_rounds or refill_seconds left no "
                "time for others; raise them, or change the prompts or filters. The metric "
                "filter/made_up has their number in every iteration",
                stacklevel=2,
            )

    def tell(self) -> str:
        """Say in words which filter rejected how many groups."""
        parts = (f"{name} rejected {count}" for name, count in self.rejected.items())
        return ", ".join(parts) or "none was rejected"

    def metrics(self) -> dict[str, float]:
        """Return how many groups each filter rejected, and how many were made up."""
        made_up = {"filter/made_up": float(self.made_up)} if self.train_on_rest else {}
        return {f"filter/{name}": float(n) for name, n in self.rejected.items()} | made_up
