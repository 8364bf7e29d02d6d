"""Training with weights in bfloat16: Lightning's ``bf16-true``, with float32 master weights."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_finite

SAVED = "master_weight"
"""Name of the copy in a parameter's state, beside the optimizer's own."""


class MasterWeights(Optimizer):
    """Wraps an optimizer so that it steps float32 copies of the 16-bit weights.

    bfloat16 has 8 bits of mantissa: a step of less than 1/256 of a weight is rounded to nothing, no
    matter how often it is made. The copies, or *master weights* (Micikevicius et al. 2018, "Mixed
    precision training", section 3.1), accumulate such steps, and after each step they are rounded
    to the weights. Parameters in float32 are stepped directly. The copies are part of the
    optimizer's state, and so of checkpoints; they take 4 bytes per parameter, and 4 more during a
    step.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        optimizer: called with the copies, in the same groups: ``torch.optim.AdamW``, for example.
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
        """Step the optimizer on the copies, and round them to the weights."""
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
        """Resume from another optimizer's state; without copies in it, start from the weights."""
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
        """Yield each 16-bit weight with its copy."""
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for weight, master in zip(ours["params"], inner["params"], strict=True):
                if weight is not master:
                    yield weight, master

    def _share_state(self) -> None:
        """Expose the inner optimizer's state, under the weights that it belongs to."""
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for weight, master in zip(ours["params"], inner["params"], strict=True):
                if master in self._inner.state:
                    self.state[weight] = self._inner.state[master]


def _master(weight: Tensor) -> Tensor:
    return weight.detach().float() if is_half(weight) else weight


def is_half(weight: Tensor) -> bool:
    """Return True if a weight has 16 bits."""
    return weight.dtype in (torch.bfloat16, torch.float16)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@torch.no_grad()
def unmoved_share(optimizer: Optimizer) -> float:
    """Return the share of 16-bit weights for which a step of the learning rate is rounded away."""
    still = count = 0
    for group in optimizer.param_groups:
        for weight in filter(is_half, group["params"]):
            moved = weight.float() + float(group["lr"])
            still += int((moved.to(weight.dtype) == weight).sum())
            count += weight.numel()
    return still / count if count else 0.0


_log = logging.getLogger(__name__)


@configurable
class BFloat16Precision(HalfPrecision):
    """Weights and activations in bfloat16; everything else keeps its dtype.

    It replaces Lightning's own plugin for ``Trainer(precision="bf16-true")``, which also rounds
    what is not part of the model: the batch's logprobs and rewards, all tensors that a step
    creates, and the frequencies of rotary embeddings, which become wrong after a few hundred
    positions.

    Args:
        master_weights: let the optimizer step float32 copies (``MasterWeights``). Without them a
            learning rate below 1/256 of a weight has no effect, unless the optimizer uses
            stochastic rounding.
    """

    precision: Literal["bf16-true"] = "bf16-true"

    def __init__(self, master_weights: bool = True) -> None:
        super().__init__("bf16-true")
        self.master_weights = master_weights

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Round all parameters, but no buffers."""
        buffers = [(part, dict(part._buffers)) for part in module.modules()]
        module.to(torch.bfloat16)
        for part, kept in buffers:
            part._buffers.update(kept)
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Read weights in float32, to check them; :meth:`convert_module` rounds them."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Do not change the dtype of tensors that a step creates."""
        return nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Return a batch with its dtypes unchanged."""
        return data


def use_our_precision(trainer: Trainer) -> None:
    """Replace Lightning's plugin by :class:`BFloat16Precision`, before the model is created."""
    if type(trainer.precision_plugin) is HalfPrecision and trainer.precision == "bf16-true":
        trainer.strategy.precision_plugin = BFloat16Precision()


def make_optimizer(module: LightningModule, make: OptimizerCallable, params: Iterable[Any]) -> Any:
    """Return the optimizer of a module's parameters, or groups of them.

    It has master weights if any parameter has 16 bits.

    Raises:
        ConfigError: if the optimizer is not supported.
    """
    check_optimizer(make)
    groups = list(params)
    optimizer = make(groups)
    _require_whole(optimizer)
    if not any(is_half(p) for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    plugin = module.trainer.precision_plugin
    if getattr(plugin, "master_weights", True):
        return MasterWeights(groups, make)
    share = unmoved_share(optimizer)
    if share > 0.5:
        _log.warning(
            "a step of the learning rate, %g, is rounded to nothing for %.0f %% of the weights, "
            "which are in bfloat16; set BFloat16Precision(master_weights=True), or use an "
            "optimizer with stochastic rounding",
            optimizer.param_groups[0]["lr"],
            100 * share,
        )
    return optimizer


def _require_whole(optimizer: Optimizer) -> None:
    """Check that an optimizer whose kernels need whole parameters gets unsharded ones.

    Raises:
        ConfigError: if the parameters are sharded.
    """
    theirs = any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if theirs and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} needs whole parameters, but ShardedStrategy and "
            "ModelParallelStrategy shard them among processes; use torch.optim.AdamW, whose state "
            "is sharded too, or strategy: ddp"
        )


def check_optimizer(make: Callable[[Any], Optimizer]) -> None:
    """Check the type and the options of an optimizer, on a throwaway parameter.

    Raises:
        ConfigError: if it cannot step with a single gradient, or has an option that is not finite.
    """
    optimizer = make([nn.Parameter(torch.zeros(1, 1, device="cpu"))])
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} evaluates the loss several times per step (its "
            "step() needs a closure), but a step here has a single gradient; use AdamW, or another "
            "optimizer without a closure"
        )
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if isinstance(v, float | tuple)}
        require_finite(**{f"optimizer.{name}": value for name, value in options.items()})
