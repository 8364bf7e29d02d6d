"""ReplayBuffer: trains on recent groups again, together with fresh ones."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl.algos.losses import SFTMix
from lightning_rl.algos.objective import Objective
from lightning_rl.collect.samplers import BufferEntry, Sampler, Uniform
from lightning_rl.config.arguments import configurable
from lightning_rl.data.rollouts.store import RolloutStore
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Group, RolloutStatus
from lightning_rl.run.files.metrics import summarize
from lightning_rl.run.processes import dist
from lightning_rl.run.seeding import run_seed


@configurable
class ReplayBuffer:
    """Stores every group in an SQLite file, and mixes older groups into each batch.

    The buffer consists of the newest ``capacity`` groups of this run that are not staler than
    ``max_staleness``. All other groups stay in the file, marked ``archived`` or ``expired``.
    Several runs may share a file, one after another: each sees only its own groups.

    On several ranks, rank 0 owns the file and draws for all, and replayed groups are distributed as
    fresh ones are. So the draw does not depend on the number of ranks.

    Replayed rollouts are off-policy: they keep the logprobs and versions of the engine that wrote
    them. Use a correction (``TokenTIS``), or ``PPOClip`` with ``use_rollout_logprobs``.

    Args:
        path: path of the SQLite file.
        capacity: maximum number of groups that may be replayed.
        max_staleness: maximum number of versions by which the oldest token of a replayed group may
            be older than the policy; None: no limit.
        sampler: chooses the groups to replay; None: ``Uniform``.
        seed: seed of that choice; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        path: str,
        capacity: int = 1024,
        max_staleness: int | None = 8,
        sampler: Sampler | None = None,
        seed: int | None = None,
    ) -> None:
        require_at_least(1, capacity=capacity, max_staleness=max_staleness)
        self.path = path
        self.store = RolloutStore(path)
        self.capacity = capacity
        self.max_staleness = max_staleness
        self.sampler = sampler or Uniform()
        self.seed = run_seed(seed)
        self.entries: list[BufferEntry] = []
        """The groups that can be replayed, in order of arrival."""
        self.metrics: dict[str, float] = {}
        """``buffer/*``, ``sample/*`` and ``rollout/archived`` of the last exchange."""
        self._run: int | None = None
        self._exchanges = 0

    def check(self, objective: Objective, use_rollout_logprobs: bool) -> None:
        """Reject a loss that cannot imitate demonstrations; warn if nothing corrects for off-policy
        rollouts.

        Raises:
            ConfigError: if the sampler gives demonstrations, and the loss is not ``SFTMix``.
        """
        if self.sampler.gives_demonstrations and not isinstance(objective.loss, SFTMix):
            raise ConfigError(
                f"buffer.sampler={type(self.sampler).__name__} with demonstration > 0 needs "
                f"model.loss=SFTMix, not {type(objective.loss).__name__}; change one of them"
            )
        warn_if_uncorrected("replayed", objective, use_rollout_logprobs)

    def use_file(self, path: Path) -> None:
        """Switch to another file; does nothing if it is the current one."""
        if path != self.store.path:
            self.store.close()
            self.store = RolloutStore(path)
            self.entries, self._run, self._exchanges = [], None, 0

    def exchange(self, fresh: Sequence[Group], version: int) -> list[Group]:
        """Store the groups just collected; return the groups to train on, the fresh ones first.

        ``version`` is the trainer's. No group is returned twice, on any rank. The result is the
        same for the same history, seed and settings, also in a resumed run. On several ranks, call
        it on all of them, each with its own share.
        """
        everyone = dist.interleaved(dist.gather(list(fresh)))
        with dist.every_rank():
            added = self._store_and_draw(everyone, version) if dist.rank() == 0 else []
        self.metrics = dist.from_rank_zero(self.metrics)
        return [*fresh, *dist.scatter(added)]

    def _store_and_draw(self, fresh: Sequence[Group], version: int) -> list[Group]:
        """Return the groups to train on in addition to the fresh ones of all ranks."""
        if self._run is None:
            self._run = self.store.next_run()
        places = self.store.add(fresh, version + 1, self._run)
        for place, group in zip(places, fresh, strict=True):
            completed = [r for r in group if r.completed]
            rewards = [r.reward for r in completed if r.reward is not None]
            versions = [version for r in completed for version in r.written_versions()]
            self.entries += _entry(place, rewards, versions)
        evicted = self._evict(version)
        old = [entry for entry in self.entries if entry.place < places[0]]
        # Stateless, so that a resumed run draws the same.
        random = np.random.default_rng([self.seed, self._exchanges])
        self._exchanges += 1
        chosen = self.sampler.choose(old, self.sampler.count(len(fresh)), random)
        replayed = [self.store.group(entry.place) for entry in chosen]
        added = [*replayed, *self.sampler.demonstrations(len(fresh), random)]
        self.metrics = {
            "buffer/size": float(len(self.entries)),
            "buffer/replayed_share": len(replayed) / (len(fresh) + len(added)),
            **evicted,
            **{f"sample/{name}": value for name, value in self.sampler.metrics().items()},
        }
        if chosen:
            staleness = [float(version - entry.oldest) for entry in chosen]
            self.metrics["buffer/staleness_mean"] = summarize(staleness)[0]
            self.metrics["buffer/staleness_max"] = max(staleness)
        return added

    def state_dict(self) -> dict[str, Any]:
        """Return references to the buffered groups, as primitives; the groups stay in the file."""
        return {
            "run": self._run,
            "exchanges": self._exchanges,
            "last": 0 if self._run is None else self.store.last(),
            "places": [entry.place for entry in self.entries],
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken; groups written since then are marked ``undone``.

        Raises:
            ConfigError: if the file lacks groups of the state.
        """
        with dist.every_rank():
            if dist.rank() == 0:
                self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        self._run, self._exchanges = state["run"], state["exchanges"]
        self.sampler.load_state_dict(state["sampler"])
        self.entries = []
        if self._run is None:
            return
        places = set(state["places"])
        rewards: dict[int, list[float]] = {place: [] for place in places}
        oldest: dict[int, list[int]] = {place: [] for place in places}
        first = min(places, default=0)
        for place, reward, version in self.store.graded(self._run, first, state["last"]):
            if place in places:
                rewards[place].append(reward)
                oldest[place].append(version)
        lost = [place for place in places if not rewards[place]]
        if lost:
            raise ConfigError(
                f"{self.store.path} lacks {len(lost)} of the {len(places)} groups that the "
                "checkpoint's buffer holds; use the file that the run wrote"
            )
        for place in sorted(places):
            self.entries += _entry(place, rewards[place], oldest[place])
        self.store.undo_after(state["last"], self._run)
        self._mark("kept", self.entries)

    def close(self) -> None:
        """Close the file; the next exchange opens it again."""
        self.store.close()

    def _evict(self, version: int) -> dict[str, float]:
        """Drop groups that are too stale, then the oldest beyond the capacity; return their
        metrics.
        """
        bound = float("inf") if self.max_staleness is None else self.max_staleness
        expired = [entry for entry in self.entries if version - entry.oldest > bound]
        fit = [entry for entry in self.entries if version - entry.oldest <= bound]
        archived, self.entries = fit[: -self.capacity], fit[-self.capacity :]
        self._mark(RolloutStatus.EXPIRED.value, expired)
        rollouts = self._mark(RolloutStatus.ARCHIVED.value, archived)
        return {
            "buffer/evicted": float(len(expired) + len(archived)),
            "buffer/expired": float(len(expired)),
            "rollout/archived": float(rollouts),
        }

    def _mark(self, state: str, entries: Sequence[BufferEntry]) -> int:
        """Set the state of groups in the file; return their number of rollouts."""
        return self.store.set_state(state, [entry.place for entry in entries]) if entries else 0


def warn_if_uncorrected(kind: str, objective: Objective, use_rollout_logprobs: bool) -> None:
    """Warn if rollouts of older policies would be treated as the current policy's."""
    if not use_rollout_logprobs and objective.correction is None:
        warnings.warn(
            f"{kind} rollouts are off-policy, but nothing corrects for it; set "
            "model.update.use_rollout_logprobs: true, or model.correction, e.g. TokenTIS",
            stacklevel=3,
        )


def _entry(place: int, rewards: Sequence[float], versions: Sequence[int]) -> list[BufferEntry]:
    """Return the entry of a group, from its rollouts' rewards; [] if no rollout can be replayed."""
    if not rewards or not versions:
        return []
    mean = math.fsum(rewards) / len(rewards)
    spread = math.fsum(abs(reward - mean) for reward in rewards) / len(rewards)
    return [BufferEntry(place, min(versions), mean, spread)]
