"""What one of several processes has that share matrices or experts, without the others."""

import copy
from collections.abc import Set as AbstractSet
from typing import TypeVar

from torch import nn

from lightning_rl.models.expert import require_experts, spread
from lightning_rl.models.policy import Policy
from lightning_rl.models.tensor import TensorRanks

Module = TypeVar("Module", bound=nn.Module)


def one_part(module: Module, tensor: int = 1, expert: int = 1) -> Module:
    """A copy of a module with the first of ``tensor`` parts of each policy's matrices.

    Or with the first of ``expert`` parts of its experts, who get as many tokens as an even load
    sends them. It computes no right numbers, since it is without the other parts, but keeps what
    one process of as many keeps. What is not split is shared with the module.

    Raises:
        ConfigError: if as many processes cannot share them.
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
    """Of a module's parameters those that stand for ``known`` ones in a part of it."""
    pairs = zip(whole.parameters(), part.parameters(), strict=True)
    return {own for parameter, own in pairs if parameter in known}
