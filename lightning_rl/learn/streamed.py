"""Stream: computes parts of an update while its batch is still being generated."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.objective import Objective
from lightning_rl.data.batch import select, tokens_of_rows, with_host
from lightning_rl.data.packing import pack_rollouts, packed_rows
from lightning_rl.data.splitting import deal_groups, split_micro_batches
from lightning_rl.learn.gradients import scale_gradients
from lightning_rl.learn.learner import Learner
from lightning_rl.learn.overlap import Overlap
from lightning_rl.learn.skipped import without
from lightning_rl.models.memory import is_out_of_memory
from lightning_rl.rollout import Group, Rollout
from lightning_rl.run.processes.dist import any_rank, rank, world_size
from lightning_rl.run.token_metrics import TokenMetrics

_log = logging.getLogger(__name__)

_COMPARED = ("input_ids", "loss_mask", "rollout_logprobs")
"""Token columns that must equal the batch's."""

_COMPUTED = ("advantages", "returns")
"""Computed columns, in which sums over a group may be taken in another order."""

ROUNDING = 1e-5
"""Relative tolerance, above what reordering a sum of hundreds of float32 numbers can cause."""


_RowName = tuple[str, int]
"""A rollout's id, and the index of one of its rows in a batch."""


class Stream(Overlap):
    """Computes scores and gradients of complete groups before their batch is complete.

    The gradients are accumulated in the policy, summed over all trained rollouts with
    :meth:`Aggregation.weights`; their divisor is only known once the batch is complete. All inputs
    of these gradients are kept, and compared with the final batch. If anything differs, because a
    callback changed a reward or a guard removed tokens, the update starts from scratch.

    Args:
        learner: returns the learner whose policy is updated, once its model is loaded.
    """

    def __init__(self, learner: Callable[[], Learner]) -> None:
        self._made = learner
        self._warned = False
        self.clear()

    @property
    def _learner(self) -> Learner:
        return self._made()

    def clear(self) -> None:
        """Forget the batch."""
        self.first = frozenset[int]()
        """Places in the batch of the groups in the first minibatch. Weights change after it, so the
        other groups are only scored ahead.
        """
        self.metrics: list[Metrics] = []
        """Metrics of the micro-batches whose gradients were computed."""
        self._begun = self._asked = False
        self._failed = False  # for lack of memory: there are no gradients, and will be none
        self._parts: list[TensorDict] = []
        self._trained: dict[_RowName, bool] = {}  # in the order of all parts
        self._order: list[_RowName] | None = None
        self._known = torch.empty(0, dtype=torch.bool)
        self._sources = self._targets = torch.empty(0, dtype=torch.long)
        self._tokens = TensorDict({}, batch_size=[0])

    def begin(self, count: int) -> None:
        """Prepare to work ahead on a batch of ``count`` groups on each rank."""
        self.clear()
        places = torch.arange(count * world_size(), device="cpu")  # ranks take turns
        first = deal_groups(places, self._learner.settings.minibatches, self._learner.dealing(0))[0]
        own = (divmod(place, world_size()) for place in first.tolist())
        self._begun, self.first = True, frozenset(n for n, owner in own if owner == rank())
        self._learner.policy.zero_grad()

    def add(self, groups: Sequence[tuple[int, Group]]) -> None:
        """Score complete groups, given with their places, and compute gradients where possible.

        Weights do not change: the optimizer steps only when the whole batch is there.
        """
        members = [(place, r) for place, group in groups for r in group if r.graded]
        if not self._begun or self._failed or not members:
            return
        rollouts = [rollout for _, rollout in members]
        place_of = {rollout.id: place for place, rollout in members}
        places = [place_of[rollout.id] for rollout, _ in packed_rows(rollouts)]
        first = torch.tensor([place in self.first for place in places], device="cpu")
        with self._learner.backend.autocast(), torch.enable_grad():
            among = [rollout for _, group in groups for rollout in group]
            packed = pack_rollouts(rollouts, among)
            part = self._learner.compute_all(packed.to(self._learner.backend.device))
            self._parts.append(part)
            try:
                trained, metrics = self._add_gradients(part, first)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                trained, metrics = first, []
                self._failed = True  # the update takes smaller micro-batches
        self._trained |= zip(_row_names(rollouts), trained.tolist(), strict=True)
        self.metrics += metrics
        if self._failed:
            self._learner.policy.zero_grad()

    def _add_gradients(self, part: TensorDict, rows: Tensor) -> tuple[Tensor, list[Metrics]]:
        """Add unnormalised gradients of the rows flagged (R,), before their minibatch is complete.

        Returns:
            Flags (R,) of the rows that have a gradient, and the micro-batches' metrics.
        """
        learner = self._learner
        part = learner.skipped.without_truncated(part.copy())
        part["tokens", "loss_weights"] = learner.aggregation.weights(part)
        skipped = learner.skipped.rows(part)
        rows = rows if skipped is None else rows & ~skipped.cpu()
        if not rows.any():
            return rows, []
        chosen = select(with_host(part), rows.nonzero().squeeze(1))
        micro_batches = split_micro_batches(
            chosen, learner.max_tokens_per_micro_batch, filling=learner.policy.filling
        )
        with learner.clock("train"):
            return rows, [
                learner.backward_micro_batch(
                    select(chosen, micro_batch), learner.objective, last=False
                )
                for micro_batch in micro_batches
            ]

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Record the rollouts of the batch, in its order."""
        self._order = _row_names(rollouts)

    def attach(self, batch: TensorDict) -> None:
        """Find the batch's rows among the scored ones; their tokens must be equal.

        Before :meth:`finish` the batch's contents are unknown, and nothing is found.
        """
        if self._order is None:
            return
        places = {name: index for index, name in enumerate(self._trained)}
        found = torch.tensor([places.get(name, -1) for name in self._order], device="cpu")
        rows = batch["rollouts", "length"].cpu()
        self._known = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        if not self._parts or len(found) != len(rows):
            return
        lengths = torch.cat([part["rollouts", "length"] for part in self._parts]).cpu()
        known = found >= 0
        if not torch.equal(lengths[found[known]], rows[known]):
            return
        columns = set.intersection(*(set(part["tokens"].keys()) for part in self._parts))
        self._tokens = torch.cat([part["tokens"].select(*columns) for part in self._parts])
        device = self._tokens.device or batch["tokens", "loss_mask"].device
        self._sources = tokens_of_rows(lengths, found[known]).to(device)
        self._targets = tokens_of_rows(rows, known.nonzero().squeeze(1)).to(device)
        if self._same(batch, *_COMPARED):
            self._known = known

    def known(self, name: str) -> Tensor | None:
        """Return flags (R,), on the host, of the batch's rows that have this column; None if none
        has.
        """
        return self._known if name in self._tokens and self._known.any() else None

    def fill(self, batch: TensorDict, *names: str) -> None:
        """Write the known values of these columns into the batch."""
        for name in names:
            if name in self._tokens:
                column = batch["tokens"].get(name, None)
                if column is None:
                    known = self._tokens[name]
                    column = known.new_zeros(batch["tokens"].batch_size + known.shape[1:])
                column[self._targets] = self._tokens[name][self._sources]
                batch["tokens", name] = column

    def complete(
        self, batch: TensorDict, rows: Tensor, objective: Objective, metrics: TokenMetrics
    ) -> bool:
        """Add the gradients of the first minibatch's other rows, and normalise their sum."""
        done = None if self._asked else self._claim(batch, objective, rows)
        self._asked = True  # the weights change after the first minibatch
        if done is None:
            return False
        learner, done = self._learner, done[rows]
        minibatch = learner.skipped.without_truncated(select(batch, rows))
        weights = minibatch["tokens", "loss_weights"] = learner.aggregation.weights(minibatch)
        found: list[Metrics] = [{"policy/streamed_share": done}]
        skipped = learner.skipped.rows(minibatch)
        if skipped is not None:
            found.append({"policy/skipped_share": skipped})
            done = done | skipped.cpu()
        found += self.metrics
        # Without gradients of its own, a rank still takes part in the average.
        if not self.metrics or not done.all() or world_size() > 1:
            rest = with_host(without(minibatch, done))
            measured, smaller = learner.backward_micro_batches(
                rest, objective, learner.micro_batch_budget
            )
            if smaller is not None:  # the learner starts anew, and takes smaller micro-batches
                return False
            found += measured
        for some in found:
            metrics.add(some)
        gradients = [p.grad for p in learner.policy.parameters() if p.grad is not None]
        scale_gradients(gradients, learner.aggregation.factor(minibatch, weights))
        return True

    def _claim(self, batch: TensorDict, objective: Objective, first: Tensor) -> Tensor | None:
        """Return flags (R,) of rows whose gradient has been added; None: all must be computed.

        ``first`` (r,) are the rows of the first minibatch, to which all of them must belong. All
        ranks make the same decision.
        """
        own = objective is self._learner.objective
        done = self._usable(batch, first) if own else None
        if not any_rank(done is None):
            return done
        if self._begun and not self._warned:
            self._warned = True
            _log.warning(
                "work done ahead for iteration %d is discarded: a callback changed rewards, tokens "
                "or the objective, or memory was insufficient; such updates start from scratch",
                self._learner.iteration + 1,
            )
        return None

    def _usable(self, batch: TensorDict, first: Tensor) -> Tensor | None:
        """Return flags (R,) of rows whose gradient has been added; None if it cannot be used."""
        trained = {name for name, flag in self._trained.items() if flag}
        if self._failed or self._order is None or not trained <= set(self._order):
            return None
        flags = torch.tensor([name in trained for name in self._order], device="cpu")
        if trained and not (self._known[flags].all() and torch.isin(flags.nonzero(), first).all()):
            return None
        same = self._same(batch, *_COMPARED) and self._same(batch, *_COMPUTED, rounding=ROUNDING)
        return flags if not trained or same else None

    def _same(self, batch: TensorDict, *names: str, rounding: float = 0.0) -> bool:
        """Return True if columns are equal, up to ``rounding`` relative to the largest number."""
        for name in names:
            if name in self._tokens and name in batch["tokens"]:
                ours = self._tokens[name][self._sources]
                theirs = batch["tokens", name][self._targets]
                if rounding and len(ours):
                    apart, largest = (ours - theirs).abs().max(), ours.abs().max()
                    same = bool(apart <= rounding * largest)
                else:
                    same = torch.equal(ours, theirs)
                if not same:
                    return False
        return True


def _row_names(rollouts: Sequence[Rollout]) -> list[_RowName]:
    """Return a name for each row that these rollouts have in a batch."""
    found: Counter[str] = Counter()
    names = []
    for rollout, _ in packed_rows(rollouts):
        names.append((rollout.id, found[rollout.id]))
        found[rollout.id] += 1
    return names
