"""A streamed update: what of it is done while its batch is still being written."""

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.objective import Aggregation, Objective
from lightning_rl.data.packing import (
    deal_groups,
    pack_rollouts,
    packed_rows,
    select,
    split_packs,
    token_rows,
    with_host,
)
from lightning_rl.learn.own_loop import OwnLoop
from lightning_rl.models.memory import is_out_of_memory
from lightning_rl.models.pretrained import Loading
from lightning_rl.rollout import Group, Rollout
from lightning_rl.run.dist import any_rank, rank, world_size
from lightning_rl.run.seeding import derived_generator

_log = logging.getLogger(__name__)

_COMPARED = ("input_ids", "loss_mask", "rollout_logprobs")
"""Columns of tokens that must be the batch's own."""

_COMPUTED = ("advantages", "returns")
"""Columns that are computed of it, where sums over a group may be taken in another order."""

ROUNDING = 1e-5
"""Above what the order of hundreds of float32 numbers makes of a sum, relative to the result."""


class StreamedUpdate:
    """Scores and gradients of rollouts that were complete before their batch was.

    The gradients are in the policy, summed over all ``trained`` rollouts with
    :meth:`Aggregation.weights`: what divides these is known when the batch is. All that went into
    them is kept, and compared with the batch in the end. Where anything differs, because a callback
    changed a reward or a guard took tokens out, the update is made as if nothing had been done.

    Args:
        first: places in the batch of the groups in the first minibatch. Weights change after it, so
            of the other groups only scores are taken ahead.
    """

    def __init__(self, first: frozenset[int]) -> None:
        self.first = first
        self.metrics: list[Metrics] = []
        """Of the packs whose gradients were taken."""
        self.failed = False
        """Whether memory did not suffice: then there are no gradients, and will be none."""
        self._parts: list[TensorDict] = []
        self._trained: dict[_RowName, bool] = {}  # in the order of all parts
        self._order: list[_RowName] | None = None
        self._known = torch.empty(0, dtype=torch.bool)
        self._sources = self._targets = torch.empty(0, dtype=torch.long)
        self._tokens = TensorDict({}, batch_size=[0])

    def add(self, rollouts: Sequence[Rollout], part: TensorDict, trained: Tensor) -> None:
        """Keep what was computed of rollouts; ``trained`` (R,) of their rows left a gradient."""
        self._trained |= zip(_row_names(rollouts), trained.tolist(), strict=True)
        self._parts.append(part)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Note the rollouts of the batch, in its order."""
        self._order = _row_names(rollouts)

    @property
    def finished(self) -> bool:
        """Whether it is known what the batch is made of."""
        return self._order is not None

    def attach(self, batch: TensorDict) -> None:
        """Find the batch's rows among those that are known; their tokens must be the same."""
        places = {name: place for place, name in enumerate(self._trained)}
        found = torch.tensor([places.get(name, -1) for name in self._order or ()], device="cpu")
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
        self._sources = _spans(lengths, found[known]).to(device)
        self._targets = _spans(rows, known.nonzero().squeeze(1)).to(device)
        if self._same(batch, *_COMPARED):
            self._known = known

    def knows(self, name: str) -> Tensor | None:
        """Flags (R,), on the host, of the batch's rows that have this column; None: none."""
        return self._known if name in self._tokens and self._known.any() else None

    def fill(self, batch: TensorDict, *names: str) -> None:
        """Write what is known of these columns into the batch."""
        for name in names:
            if name in self._tokens:
                column = batch["tokens"].get(name, None)
                if column is None:
                    column = torch.zeros_like(batch["tokens", "rollout_logprobs"])
                column[self._targets] = self._tokens[name][self._sources]
                batch["tokens", name] = column

    def usable(self, batch: TensorDict, first: Tensor) -> Tensor | None:
        """Flags (R,) of rows whose gradient is in the policy; None if it is not the batch's.

        ``first`` (r,) are the rows of the first minibatch, to which all of them must belong.
        """
        trained = {name for name, flag in self._trained.items() if flag}
        if self.failed or self._order is None or not trained <= set(self._order):
            return None
        flags = torch.tensor([name in trained for name in self._order], device="cpu")
        if trained and not (self._known[flags].all() and torch.isin(flags.nonzero(), first).all()):
            return None
        same = self._same(batch, *_COMPARED) and self._same(batch, *_COMPUTED, rounding=ROUNDING)
        return flags if not trained or same else None

    def _same(self, batch: TensorDict, *names: str, rounding: float = 0.0) -> bool:
        """Whether columns are equal, but for ``rounding`` relative to the largest number."""
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


_RowName = tuple[str, int]
"""A rollout's id, and which of its rows in a batch."""


def _row_names(rollouts: Sequence[Rollout]) -> list[_RowName]:
    """A name for each row that these rollouts have in a batch."""
    found: Counter[str] = Counter()
    names = []
    for rollout, _ in packed_rows(rollouts):
        names.append((rollout.id, found[rollout.id]))
        found[rollout.id] += 1
    return names


def _spans(lengths: Tensor, rows: Tensor) -> Tensor:
    """Indices of the tokens of these rows (r,), in their order, of rows of such lengths (R,)."""
    starts, sizes = (lengths.cumsum(0) - lengths)[rows], lengths[rows]
    ends = sizes.cumsum(0)
    return torch.arange(int(sizes.sum())) + torch.repeat_interleave(starts - ends + sizes, sizes)


class StreamingLoop(OwnLoop):
    """A module that works on groups as they are complete, while an engine writes the others.

    ``streams``: whether it is asked to in this run; on all ranks alike.
    """

    model: str
    random_init: bool
    loading: Loading
    trust_remote_code: bool
    cast_lm_head_to_fp32: bool
    advantage: Advantage
    aggregation: Aggregation
    objective: Objective
    trust_engine_logprobs: bool
    seed: int
    minibatches: int
    max_tokens_per_pack: int
    mask_truncated: bool
    streams = False
    _said = False

    def __init__(self) -> None:
        super().__init__()
        self.streamed: StreamedUpdate | None = None
        """Of the batch that is being written, or was written last."""

    @abstractmethod
    def left_out(self, batch: TensorDict) -> Tensor | None:
        """Rollouts, (R,), that the update leaves out; None: none."""

    @abstractmethod
    def backward_pack(self, pack: TensorDict, objective: Objective, last: bool) -> Metrics:
        """Add a pack's gradient."""

    def begin_stream(self, groups: int) -> StreamedUpdate:
        """Get ready to work ahead on a batch of so many groups on each rank."""
        places = torch.arange(groups * world_size(), device="cpu")  # ranks take turns
        first = deal_groups(places, self.minibatches, self.dealing(0))[0].tolist()
        own = (divmod(place, world_size()) for place in first)
        self.streamed = StreamedUpdate(frozenset(n for n, owner in own if owner == rank()))
        self.loaded_policy.zero_grad()
        return self.streamed

    def dealing(self, epoch: int) -> torch.Generator:
        """What deals the groups of this iteration to minibatches."""
        return derived_generator(self.seed, self.iteration, epoch)

    def stream(self, groups: Sequence[tuple[int, Group]]) -> None:
        """Score complete groups, given with their places, and take gradients where it can be done.

        Weights stay as they are: only with the whole batch the optimizer steps.
        """
        streamed = self.streamed
        members = [(place, r) for place, group in groups for r in group if r.graded]
        if streamed is None or streamed.failed or not members:
            return
        rollouts = [rollout for _, rollout in members]
        place_of = {rollout.id: place for place, rollout in members}
        places = [place_of[rollout.id] for rollout, _ in packed_rows(rollouts)]
        first = torch.tensor([place in streamed.first for place in places], device="cpu")
        with self._as_in_a_step(), torch.enable_grad():
            part = self.compute_all(pack_rollouts(rollouts).to(self.device))
            masked = self.without_truncated(part.copy())
            left_out = self.left_out(masked)
            trained = first if left_out is None else first & ~left_out.cpu()
            streamed.add(rollouts, part, trained)
            try:
                with self.clock("train"):
                    streamed.metrics += self._gradients_of(masked, trained)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                streamed.failed = True  # the update takes smaller packs
        if streamed.failed:
            self.loaded_policy.zero_grad()

    def attach_stream(self, batch: TensorDict) -> None:
        """Before a batch is computed: is it the one whose groups were streamed?"""
        if self.streamed is not None and self.streamed.finished:
            self.streamed.attach(batch)

    def claim_stream(self, batch: TensorDict, objective: Objective, first: Tensor) -> Tensor | None:
        """Flags (R,) of rollouts whose gradient is in the policy; None: the update is to take all.

        ``first`` (r,): rows of the first minibatch. All ranks decide alike.
        """
        if not self.streams:
            return None
        streamed = self.streamed
        if streamed is None or objective is not self.objective:
            done = None
        else:
            done = streamed.usable(batch, first)
        if not any_rank(done is None):
            return done
        if streamed is not None and not self._said:
            self._said = True
            _log.warning(
                "what was streamed of iteration %d is not used: a callback changed rewards, tokens "
                "or the objective, or memory did not suffice; such updates begin anew",
                self.present_iteration,
            )
        return None

    def _gradients_of(self, part: TensorDict, trained: Tensor) -> list[Metrics]:
        rows = trained.nonzero().squeeze(1)
        if not len(rows):
            return []
        part["tokens", "loss_weights"] = self.aggregation.weights(part)
        chosen = select(with_host(part), rows)
        return [
            self.backward_pack(select(chosen, pack), self.objective, last=False)
            for pack in split_packs(chosen, self.max_tokens_per_pack)
        ]

    def without_truncated(self, batch: TensorDict) -> TensorDict:
        """Take rollouts that hit ``max_tokens`` out of the loss, if that is wanted."""
        if self.mask_truncated:
            truncated_T = batch["rollouts", "truncated"][token_rows(batch)]
            batch["tokens", "loss_mask"] = batch["tokens", "loss_mask"] & ~truncated_T
        return batch

    def _as_in_a_step(self) -> AbstractContextManager[object]:
        """The precision of a training step."""
        if self._trainer is None:
            return nullcontext()
        context: AbstractContextManager[object] = self.trainer.precision_plugin.train_step_context()
        return context
