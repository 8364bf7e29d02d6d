"""One model's matrices over several ranks: tensor parallelism as Megatron-LM has it.

Each of n ranks has 1/n of the attention heads, of an MLP's inner width and of the vocabulary, and
computes its part of every layer for all tokens of a micro-batch. Where the parts meet, behind
attention and behind the MLP, an all-reduce adds them up; in the backward pass another adds up the
gradients in front of them (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Norms, and all else
that is not in transformers' plan of the model (``base_model_tp_plan``), every rank computes alike.

Parameters are DTensors, so that FSDP2 shards each rank's part further, and checkpoints, norms and
exports see whole tensors. Layers compute with plain local parts: no other code sees a DTensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from lightning_rl.models.parallel.tensor_plan import dims_of, require_divisible, styles_of


class TensorRanks:
    """Neighbouring ranks that have a model's matrices together.

    Args:
        mesh: the one-dimensional mesh of these ranks; None when planning: one rank stands in for
            all of them.
        size: how many they are; None: as the mesh has.
    """

    def __init__(self, mesh: DeviceMesh | None, size: int | None = None) -> None:
        self.mesh = mesh
        self.size = mesh.size() if mesh is not None else size or 1
        self.index = 0 if mesh is None else mesh.get_local_rank()
        self.group: Any = None if mesh is None else mesh.get_group()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same on each."""
        return self._reduced(part, dist.ReduceOp.SUM)

    def max(self, part: Tensor) -> Tensor:
        """The element-wise maximum of all ranks' tensors."""
        return self._reduced(part, dist.ReduceOp.MAX)

    def _reduced(self, part: Tensor, operation: Any) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        if self.mesh is not None:
            dist.all_reduce(total, operation, group=self.group)
        return total

    def parameter(self, whole: nn.Parameter, dim: int | None) -> nn.Parameter:
        """Return this rank's part of a parameter, split along ``dim``; None: all of it."""
        part = whole.detach()
        if dim is not None:
            part = part.chunk(self.size, dim)[self.index].clone(
                memory_format=torch.contiguous_format
            )
        if self.mesh is not None:
            placement = Replicate() if dim is None else Shard(dim)
            part = DTensor.from_local(part, self.mesh, [placement], run_check=False)
        return nn.Parameter(part, requires_grad=whole.requires_grad)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, whose gradient is of that part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Enter(torch.autograd.Function):
    """The identity, where ranks begin to compute different parts: backward sums gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(grad), None


class _Leave(torch.autograd.Function):
    """The sum of what each rank has; all get its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# ---------------------------------------------------------------- modules


class _Computing(NamedTuple):
    """How a module computes: with which ranks, and whether within a split part of its layer."""

    ranks: TensorRanks
    inside: bool


class _Local:
    """A module that computes with this rank's parts of its own parameters."""

    _computing: _Computing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with parameters_as(self, self._part):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _part(self, parameter: Tensor) -> Any:
        ranks, inside = self._computing
        part = local(parameter)
        # Within a split part of a layer each rank uses it for something else.
        return _Enter.apply(part, ranks) if inside else part


@contextmanager
def parameters_as(module: Any, change: Callable[[Tensor], Any]) -> Iterator[None]:
    """A module computes with something else than its own parameters in this block."""
    whole = dict(module._parameters)
    changed = {name: change(p) for name, p in whole.items() if p is not None}
    module._parameters.update(changed)
    try:
        yield
    finally:
        module._parameters.update(whole)


class _SplitEmbedding(nn.Embedding):
    """An embedding of which each rank has the rows of its part of the vocabulary."""

    _computing: _Computing

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings (..., D) of all ids, the same on each rank."""
        weight, ranks = local(self.weight), self._computing.ranks
        own, inside = within(ids, ranks.index * len(weight), len(weight))
        padding = self.padding_idx
        if padding is not None:  # that token's row gets no gradient
            padding -= ranks.index * len(weight)
            padding = padding if 0 <= padding < len(weight) else None
        rows = F.embedding(own, weight, padding)
        whole: Tensor = _Leave.apply(rows.masked_fill(~inside[..., None], 0.0), ranks)
        return whole


def within(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Ids as they count from ``first`` on, those beyond ``count`` as 0; and which are inside."""
    inside = (ids >= first) & (ids < first + count)
    return (ids - first).where(inside, 0), inside


@cache
def _local_class(kind: Any) -> Any:
    return type(kind.__name__, (_Local, kind), {"__module__": kind.__module__})


@cache
def _split_embedding_class(kind: Any) -> Any:
    """Return a split embedding that keeps what a subclass does with embeddings, such as scaling."""
    bases = (_SplitEmbedding,) if kind is nn.Embedding else (kind, _SplitEmbedding)
    return type(kind.__name__, bases, {"__module__": kind.__module__})


# ---------------------------------------------------------------- splitting


def split(model: PreTrainedModel, ranks: TensorRanks) -> None:
    """Leave this rank its part of a transformer's body, and of its output head, in place.

    Raises:
        ConfigError: naming what these ranks cannot share.
    """
    require_divisible(model, ranks.size)
    body = model.base_model
    styles = styles_of(body)
    dims, inside = dims_of(body, styles, ranks.size), set[nn.Module]()
    for name, style in styles.items():
        if style == "rowwise":
            body.get_submodule(name).register_forward_hook(_leaving(ranks))
            continue
        region = body.get_submodule(name.rpartition(".")[0])
        if region not in inside:
            region.register_forward_pre_hook(_entering(region, ranks), with_kwargs=True)
            inside |= set(region.modules())
    for end in (body.get_input_embeddings(), model.get_output_embeddings()):
        if end is not None:
            dims |= dict.fromkeys(end.parameters(), 0)
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        for name, whole in own.items():
            if whole not in known:
                known[whole] = ranks.parameter(whole, dims.get(whole))
            module.register_parameter(name, known[whole])
        if module is body.get_input_embeddings():
            _compute(module, _split_embedding_class, ranks)
        elif own:
            alike = not any(parameter in dims for parameter in own.values())
            _compute(module, _local_class, ranks, alike and module in inside)


def replicate(module: nn.Module, ranks: TensorRanks) -> None:
    """Let every rank have all of a module, and compute it alike, in place."""
    for part in list(module.modules()):
        own = dict(part.named_parameters(recurse=False))
        for name, whole in own.items():
            part.register_parameter(name, ranks.parameter(whole, None))
        if own:
            _compute(part, _local_class, ranks)


def _compute(
    module: Any, as_class: Callable[[Any], Any], ranks: TensorRanks, inside: bool = False
) -> None:
    module.__class__ = as_class(module.__class__)
    module._computing = _Computing(ranks, inside)


def _entering(region: nn.Module, ranks: TensorRanks) -> Callable[..., Any]:
    """A hook in front of the layers that ranks compute differently from the same input."""
    first = next(iter(signature(region.forward).parameters))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_Enter.apply(args[0], ranks), *args[1:]), kwargs
        return args, kwargs | {first: _Enter.apply(kwargs[first], ranks)}

    return enter


def _leaving(ranks: TensorRanks) -> Callable[..., Any]:
    """A hook behind the layer whose outputs add up to the whole."""

    def leave(module: nn.Module, args: object, output: Tensor) -> Any:
        return _Leave.apply(output, ranks)

    return leave
