"""The peak memory of a pass over a micro-batch: each allocation is followed until it is freed."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rl.cli.check.fake_models import changed
from lightning_rl.cli.check.gathering import (
    HEAD,
    HEAD_BACKWARD,
    LAYER,
    LAYER_BACKWARD,
    REDUCED,
    Gathering,
)
from lightning_rl.models import heads, input_offloading
from lightning_rl.models.input_offloading import host_memory
from lightning_rl.models.parallel.tensor import local
from lightning_rl.models.policy import Policy
from lightning_rl.models.quantized_layers import QuantizedLinear
from lightning_rl.models.recompute import layers_of
from lightning_rl.models.sampling import sampled_logits

STATES, LOGITS, COPIES, GRADIENTS = "states", "logits", "copies of weights", "gradients"
HOST = "host"
"""Kinds of what is allocated; the last is not on the device."""


class Moment(NamedTuple):
    """A moment of an update: its name, and bytes by kind beside what stays between updates."""

    name: str = LAYER
    parts: Mapping[str, float] = {}

    @property
    def total(self) -> float:
        """Total bytes."""
        return sum(self.parts.values())


class Tracker(TorchDispatchMode):
    """Follows the storages that operations allocate, until they are freed.

    Fake tensors count as others. A kernel's internal workspace is not seen.

    Args:
        policy: what computes; its weights existed before.
        mixed: it computes in bfloat16 by autocast.
        shares: by kind, the share of what is allocated that counts; by default all of it.
    """

    def __init__(
        self, policy: Policy, mixed: bool = False, shares: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        weights = [local(p) for p in policy.parameters()]
        self._before = {w.untyped_storage()._cdata for w in weights}
        self._shapes = {w.shape for w in weights} | {w.mT.shape for w in weights if w.ndim > 1}
        self.matrix = torch.Size([0, 0])
        """Shape of the output layer's weight, or of its rows of which logits are computed."""
        self._cast = torch.bfloat16 if mixed and policy.lm.dtype != torch.bfloat16 else None
        self._shares = shares or {}
        self._there: dict[int, tuple[int, str, Any]] = {}
        self.now: dict[str, float] = defaultdict(float)
        """Bytes by kind."""
        self.host = 0
        """Bytes that wait in host memory."""
        self.kept = self.sent = 0.0
        """Bytes of states, and those in host memory, between the forward and backward pass."""
        self.moment, self.peak = LAYER, Moment()
        self.turned = self.scoring = self.unpacking = False
        """True during the backward pass, while logits are computed, and while quantized weights are
        unpacked: what is allocated then are copies of weights.
        """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for made in tree_leaves(returned):
            if isinstance(made, Tensor):
                self._note(made)
        return returned

    def begin(self, moment: str, held: Mapping[str, float]) -> None:
        """Begin a moment, with other sizes of some kinds."""
        self.moment = moment
        self.now.update(held)
        self._look()

    def add(self, size: float, kind: str) -> None:
        """Add ``size`` bytes to a kind."""
        if kind == HOST:
            self.host += int(size)
            return
        self.now[kind] += size * self._shares.get(kind, 1)
        if size > 0:
            self._look()

    def count_as(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor's storage as another kind."""
        address = tensor.untyped_storage()._cdata
        if address in self._there:
            size, before, reference = self._there[address]
            self._there[address] = size, kind, reference
            self.add(-size, before)
            self.add(size, kind)

    def _look(self) -> None:
        if sum(self.now.values()) > self.peak.total:
            self.peak = Moment(self.moment, dict(self.now))

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # by its object: fake tensors have no data
        address = storage._cdata
        if address in self._before or address in self._there:
            return
        size, kind = storage.nbytes(), self._kind(tensor)
        self._there[address] = size, kind, ref(storage, partial(self._gone, address))
        self.add(size, kind)

    def _kind(self, tensor: Tensor) -> str:
        known = tensor.shape in self._shapes or (self.scoring and tensor.shape == self.matrix)
        of_weight = known and (self.turned or tensor.dtype == self._cast)
        if self.unpacking or of_weight:
            return COPIES
        is_chunk = self.scoring and tensor.ndim == 2 and tensor.shape[1] == self.matrix[0]
        return LOGITS if is_chunk else STATES

    def _gone(self, address: int, _: Any) -> None:
        size, kind, _ = self._there.pop(address)
        self.add(-size, kind)


def follow(
    policy: Policy,
    micro_batch: TensorDict,
    mixed: bool = False,
    bonus: bool = False,
    shares: Mapping[str, float] | None = None,
    gathering: Gathering | None = None,
    before: Mapping[str, float] | None = None,
) -> Tracker:
    """Follow a forward and a backward pass; the policy's gradients are left as they were.

    Args:
        policy: it may be of fake tensors.
        micro_batch: what it computes.
        mixed: compute in bfloat16 by autocast.
        bonus: the loss has an entropy term, which takes another chunk of logits.
        shares: as :class:`Tracker` has them.
        gathering: how weights are gathered from several processes; None: this one has them all.
        before: bytes by kind that there are before. With ``gradients``, earlier passes have left
            all of them, and others are added to these.
    """
    tracker = Tracker(policy, mixed, shares)
    parts = _Parts(tracker, policy, gathering, GRADIENTS in (before or {}))

    def memory(tensor: Tensor) -> Tensor:
        made = host_memory(tensor)
        tracker.count_as(made, HOST)
        return made

    def unpacked(*arguments: Any) -> Tensor:
        with changed(tracker, unpacking=True):
            return unpack(*arguments)

    def sampled(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        tracker.scoring = True  # until a layer's turn comes
        tracker.matrix = arguments[1].shape
        return sampled_logits(*arguments)

    unpack = QuantizedLinear.unpacked
    # As Lightning's autocast is, which caches no copy.
    kind = policy.lm.device.type
    with (
        changed(input_offloading, host_memory=memory),
        changed(heads, sampled_logits=sampled),
        changed(QuantizedLinear, unpacked=unpacked),
        torch.enable_grad(),
        torch.autocast(kind, torch.bfloat16, enabled=mixed, cache_enabled=False),
        parts,
        tracker,
    ):
        tracker.begin(LAYER, before or {})
        scores = policy(micro_batch)
        parts.turn()
        columns = [scores.logprobs, scores.values, scores.entropy if bonus else None]
        torch.stack([x.sum() for x in columns if x is not None]).sum().backward()
        del scores, columns
        parts.finish()
    return tracker


class _Parts:
    """Tells a tracker, by hooks, which moments begin, and where gradients and weights are then."""

    def __init__(
        self, tracker: Tracker, policy: Policy, gathering: Gathering | None, earlier: bool
    ) -> None:
        self.tracker, self.gathering, self.earlier = tracker, gathering, earlier
        self.layers = layers_of(policy)
        self.before = [(p, p.grad) for p in policy.parameters() if p.requires_grad]
        self.done = -1
        """Number of layers whose backward pass is done; -1: the head's is not."""

    def __enter__(self) -> None:
        for parameter, _ in self.before:
            parameter.grad = None
        self._hooks: list[Any] = [x.register_forward_pre_hook(self._begun) for x in self.layers]
        self._hooks += [layer.register_forward_hook(self._computed) for layer in self.layers]
        self._hooks += [p.register_post_accumulate_grad_hook(self._given) for p, _ in self.before]

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter, gradient in self.before:
            parameter.grad = gradient

    def turn(self) -> None:
        """Mark the end of the forward pass."""
        self.tracker.kept, self.tracker.sent = self.tracker.now[STATES], self.tracker.host
        self.tracker.turned = True
        self._begin(HEAD_BACKWARD)

    def finish(self) -> None:
        """Mark the end of the head's backward pass, or of one layer's."""
        if self.gathering is not None and self.done >= 0:
            self._begin(REDUCED)
            for parameter in {p for layer in self.layers for p in layer.parameters()}:
                if parameter.grad is not None:
                    size, parameter.grad = parameter.grad.nbytes, None
                    if not self.earlier:
                        self.tracker.add(size / self.gathering.shards, GRADIENTS)
        self.done += 1

    def _begin(self, moment: str) -> None:
        held = {} if self.gathering is None else self.gathering.held(moment, self.done > 0)
        self.tracker.begin(moment, held)

    def _begun(self, layer: nn.Module, arguments: Any) -> None:
        self.tracker.scoring = False
        if not self.tracker.turned:  # else it is computed again
            self._begin(LAYER)

    def _computed(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        if self.tracker.turned:
            return
        self._begin(HEAD)
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            states.register_hook(self._due)

    def _due(self, gradient: Tensor) -> None:
        self.finish()
        self._begin(LAYER_BACKWARD)
        self.tracker.scoring = False

    def _given(self, parameter: Any) -> None:
        if self.gathering is not None:  # it stays whole until those of its layer are summed
            self.tracker.count_as(parameter.grad, COPIES)
        elif self.earlier:
            parameter.grad = None  # it is added to what there is
        else:
            self.tracker.count_as(parameter.grad, GRADIENTS)
