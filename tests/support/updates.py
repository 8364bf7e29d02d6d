"""Share between tests of an update plain gradient steps, and what is recorded of them."""

import torch
from torch import Tensor

from lightning_rl.module import PolicyModule


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def last_gradients(module: PolicyModule) -> dict[str, Tensor]:
    named = module.policy.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], relative: float) -> None:
    assert ours.keys() == theirs.keys()
    size = torch.stack([g.norm() for g in theirs.values()]).norm()
    for name in ours:
        gap = (ours[name] - theirs[name]).norm()
        assert gap <= relative * (theirs[name].norm() + size), name
