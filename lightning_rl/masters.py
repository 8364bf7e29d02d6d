"""Weights in 16 bits that learn in 32: an optimizer's steps are taken on float32 copies."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer

SAVED = "master_weight"
"""The copy's name in a parameter's state, beside the optimizer's own."""


class MasterWeights(Optimizer):
    """Another optimizer, of float32 copies of the weights that have 16 bits.

    bfloat16 has 8 bits of mantissa: a step of less than 1/256 of a weight rounds to nothing, as
    often as it may be taken. The copies, or *master weights* (Micikevicius et al. 2018, "Mixed
    precision training", section 3.1), add such steps up, and after each the weights are the copies,
    rounded. Parameters in float32 are stepped as they are. The copies are part of the optimizer's
    state, so of a checkpoint; they take 4 bytes per parameter, and 4 more during a step.

    Args:
        params: parameters, or groups of them, as of any optimizer.
        optimizer: called with the copies, grouped alike: ``torch.optim.AdamW``, for example.
    """

    def __init__(self, params: Iterable[Any], optimizer: OptimizerCallable) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        groups = [group | {"params": list(group["params"])} for group in groups]
        copies = [group | {"params": list(map(_master, group["params"]))} for group in groups]
        self._inner = optimizer(copies)
        made = zip(self._inner.param_groups, groups, strict=True)
        super().__init__(
            [inner | {"params": group["params"]} for inner, group in made], self._inner.defaults
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer on the copies; the weights follow."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Schedules change what they see: our groups.
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(ours))
        for weight, master in self._pairs():
            if SAVED not in self.state.get(weight, {}):
                master.copy_(weight)  # sharded strategies load weights when we are made already
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        self._inner.step()
        for weight, master in self._pairs():
            if master.grad is not None:
                weight.copy_(master)
                self._inner.state[master][SAVED] = master
            master.grad = None
        self._share_state()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from another's state; without copies in it, from the weights as they are."""
        self._inner.load_state_dict(state_dict)  # ours would round the state to the weights' dtype
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update(_settings(inner))
        with torch.no_grad():
            for weight, master in self._pairs():
                state = self._inner.state.get(master, {})
                if SAVED in state:
                    weight.copy_(master.copy_(state[SAVED]))
                    state[SAVED] = master
                else:
                    master.copy_(weight)
        self._share_state()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight in 16 bits, and its copy."""
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for weight, master in zip(ours["params"], inner["params"], strict=True):
                if weight is not master:
                    yield weight, master

    def _share_state(self) -> None:
        """What is saved is the optimizer's own state, under the weights that it is of."""
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for weight, master in zip(ours["params"], inner["params"], strict=True):
                if master in self._inner.state:
                    self.state[weight] = self._inner.state[master]


def _master(weight: Tensor) -> Tensor:
    return weight.detach().float() if is_half(weight) else weight


def is_half(weight: Tensor) -> bool:
    """Whether a weight has 16 bits."""
    return weight.dtype in (torch.bfloat16, torch.float16)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@torch.no_grad()
def unmoved_share(optimizer: Optimizer) -> float:
    """The share of weights in 16 bits that a step of the learning rate's size rounds away."""
    still = count = 0
    for group in optimizer.param_groups:
        for weight in filter(is_half, group["params"]):
            moved = weight.float() + float(group["lr"])
            still += int((moved.to(weight.dtype) == weight).sum())
            count += weight.numel()
    return still / count if count else 0.0
