"""One process's part of a model under tensor or expert parallelism, without the others."""

import copy
from collections.abc import Set as AbstractSet
from typing import TypeVar

from torch import nn

from lightning_rl.models.parallel.expert import require_experts, spread
from lightning_rl.models.parallel.tensor import TensorRanks
from lightning_rl.models.policy import Policy

Module = TypeVar("Module", bound=nn.Module)


def one_part(module: Module, tensor: int = 1, expert: int = 1) -> Module:
    """Return a copy of a module with the first of ``tensor`` parts of each policy's matrices.

    Or with the first of ``expert`` parts of its experts, which get the number of tokens of an even
    load. Its results are wrong without the other parts, but its memory is that of one process.
    Parameters that are not split are shared with the module.

    Raises:
        ConfigError: if the matrices or experts cannot be split into as many parts.
    """
    kept = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    part = copy.deepcopy(module, kept)
    for policy in [each for each in part.modules() if isinstance(each, Policy)]:
        if tensor > 1:
            policy.split(TensorRanks(None, tensor))
        if expert > 1:
            require_experts(policy.lm, expert)
            spread(policy, TensorRanks(None, expert))
    return part


def parts_of(
    known: AbstractSet[nn.Parameter], whole: nn.Module, part: nn.Module
) -> set[nn.Parameter]:
    """Return the parameters of a part that correspond to the ``known`` ones of the whole module."""
    pairs = zip(whole.parameters(), part.parameters(), strict=True)
    return {own for parameter, own in pairs if parameter in known}
