"""Expert parallelism: a mixture's experts on several ranks.

Each of n ranks holds 1/n of every layer's experts; nothing else changes. One all-to-all sends each
token's state to the ranks of its experts, and another returns the outputs, which the gates weight
(Lepikhin et al. 2020, GShard, arXiv 2006.16668). Experts compute as in transformers. A token's
outputs are added in the order of its choices, so the sum does not depend on the placement of
experts.

Parameters are DTensors, as in :mod:`lightning_rl.models.parallel.tensor`, so that FSDP2 shards each
rank's experts further, over the ranks that have the same ones.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rl.errors import ConfigError
from lightning_rl.models.parallel.exchange import AllToAll, exchanged
from lightning_rl.models.parallel.tensor import TensorRanks, local, parameters_as


def experts_of(module: nn.Module) -> list[Any]:
    """Return all stacks of experts in a module: transformers' modules with parameters (E, ...)."""
    return [part for part in module.modules() if _is_stack(part)]


def _is_stack(part: Any) -> bool:
    own = list(part.parameters(recurse=False))
    if not own or not hasattr(part, "_apply_gate"):  # what transformers gives each such module
        return False
    return all(len(parameter) == part.num_experts for parameter in own)


def require_experts(lm: PreTrainedModel, size: int) -> None:
    """Check that ``size`` ranks can share a model's experts.

    Raises:
        ConfigError: if it has none, or a feature of the model prevents it.
    """
    hindrance = None
    if not experts_of(lm):
        hindrance = f"{type(lm).__name__} has no experts to spread over processes"
    elif hasattr(lm.config, "vision_config"):
        hindrance = f"a model that sees pictures ({lm.config.model_type}) is not split yet"
    elif any(module._compiled_call_impl is not None for module in lm.modules()):
        hindrance = "compile is not tested with expert parallelism"
    if hindrance is not None:
        raise ConfigError(f"expert={size}: {hindrance}; leave it out, or set expert: 1")


def spread(module: nn.Module, ranks: TensorRanks) -> list[nn.Module]:
    """Keep only this rank's part of each stack of experts, in place; return the stacks.

    Raises:
        ConfigError: if the number of ranks does not divide the experts.
    """
    stacks = experts_of(module)
    for experts in stacks:
        count = experts.num_experts
        if count % ranks.size:
            raise ConfigError(
                f"expert={ranks.size} does not divide the {count} experts of a layer; set expert "
                f"to a divisor of {count}"
            )
        for name, whole in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, ranks.parameter(whole, 0))
        experts.num_experts = count // ranks.size
        kind: Any = type(experts)
        experts.__class__ = _hosting_class(kind)
        experts.ranks = ranks
    return stacks


def hosts_in(module: nn.Module) -> list[Any]:
    """Return the stacks of which this rank has a part."""
    return [part for part in module.modules() if isinstance(part, _Hosting)]


class _Journey(NamedTuple):
    """The routes of S tokens' states, with a copy for each of their K choices.

    ``order`` (S K,): indices of the choices, sorted by expert. ``experts`` (R,): this rank's expert
    for each of the R states that it receives. ``counts``: the numbers of states to send to and
    receive from each rank.
    """

    order: Tensor
    experts: Tensor
    counts: tuple[Sequence[int], Sequence[int]] | None


def _planned(chosen: Tensor, own: int, ranks: TensorRanks) -> _Journey:
    """Plan the routes to the chosen experts (S K,), of which each rank has ``own``."""
    order = chosen.argsort(stable=True)
    if ranks.mesh is None:  # one that stands for all: as many come as go
        return _Journey(order, chosen[order] % own, None)
    going = torch.bincount(chosen, minlength=own * ranks.size)
    coming = exchanged(going, ranks.group)
    table = torch.stack([going, coming]).unflatten(1, (ranks.size, own))
    sent, received = table.sum(2).tolist()
    numbers = torch.arange(own, device=chosen.device).repeat(ranks.size)
    experts = numbers.repeat_interleave(coming, output_size=sum(received))
    return _Journey(order, experts, (sent, received))


class _Hosting:
    """A stack with some of the experts, which compute for all ranks' tokens that chose them.

    Losses are weighted to be averaged over all ranks of the run. FSDP2 averages over the world / n
    ranks with the same experts, whose gradients are sums over n ranks' tokens: so each gradient is
    divided by n.
    """

    ranks: TensorRanks
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return outputs (S, D) of S states by K of the layer's experts each, weighted by gates."""
        choices = top_k_index.shape[1]
        with torch.no_grad():
            journey = _planned(top_k_index.flatten(), self.num_experts, self.ranks)
        with parameters_as(self, self._part):
            dtype = next(iter(self._parameters.values())).dtype  # type: ignore[attr-defined]
            states = hidden_states[journey.order // choices].to(dtype)
            guests = self._sent(states, journey.counts)
            outputs = self._computed(guests, journey.experts)
        back = None if journey.counts is None else journey.counts[::-1]
        home = self._sent(outputs, back)[journey.order.argsort()]
        weighted = home.unflatten(0, (-1, choices)) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)

    def _computed(self, states: Tensor, experts: Tensor) -> Tensor:
        """Return the outputs of this rank's experts (R,) for states (R, D)."""
        # Of a rank that has no guest all parameters get a gradient, too: FSDP2 sums those of all.
        none = not len(states)
        if none:
            states, experts = F.pad(states, (0, 0, 0, 1)), F.pad(experts, (0, 1))
        alone = states.new_ones(len(states), 1)
        outputs: Tensor = super().forward(states, experts[:, None], alone)  # type: ignore[misc]
        return outputs[:0] if none else outputs

    def _sent(self, rows: Tensor, counts: tuple[Sequence[int], Sequence[int]] | None) -> Any:
        if self.ranks.mesh is None:
            return rows.clone()  # takes as much memory
        return AllToAll.apply(rows, self.ranks.group, counts)

    def _part(self, parameter: Tensor) -> Any:
        return _Averaged.apply(local(parameter), self.ranks.size)


class _Averaged(torch.autograd.Function):
    """Divides a parameter's gradient by the number of ranks whose tokens it sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


@cache
def _hosting_class(kind: Any) -> Any:
    return type(kind.__name__, (_Hosting, kind), {"__module__": kind.__module__})
