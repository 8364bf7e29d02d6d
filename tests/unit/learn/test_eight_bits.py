"""Test an optimizer of bitsandbytes, whose state has 8 bits, as a configuration names it."""

import io

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from lightning_rl import PolicyModule
from lightning_rl.learn.precision import MasterWeights, check_optimizer

pytest.importorskip("bitsandbytes")

MODEL = {
    "class_path": "lightning_rl.PolicyModule",
    "init_args": {
        "model": "nowhere",
        "optimizer": {
            "class_path": "bitsandbytes.optim.AdamW8bit",
            "init_args": {"lr": 1e-3, "weight_decay": 0.0},
        },
    },
}


@pytest.fixture(scope="module")
def make():
    """Build what a configuration makes of its text."""
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    module = parser.instantiate_classes(parser.parse_object({"model": MODEL})).model
    assert isinstance(module, PolicyModule)
    return module.optimizer


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return a parameter whose state has 8 bits, and one that is too small for that."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(*shape, generator=generator) for shape in ((80, 64), (7,)))
    return [nn.Parameter(x.to(dtype)) for x in drawn]


def steps(optimizer, weights, numbers) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()


def test_a_configuration_names_it(make):
    check_optimizer(make)
    weights = parameters(torch.float32)
    optimizer = make(weights)
    steps(optimizer, weights, [0])
    large, small = (optimizer.state[weight]["state1"] for weight in weights)
    assert (large.dtype, small.dtype) == (torch.uint8, torch.float32)
    [group] = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.0)


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)],
    ids=["float32", "masters", "bfloat16"],
)
def test_it_goes_on_from_a_file_as_if_never_stopped(make, dtype, masters):
    def made(weights):
        return MasterWeights(weights, make) if masters else make(weights)

    whole, first = parameters(dtype), parameters(dtype)
    steps(made(whole), whole, range(5))
    stopped = made(first)
    steps(stopped, first, range(3))
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    resumed = [nn.Parameter(weight.detach().clone()) for weight in first]
    going_on = made(resumed)
    going_on.load_state_dict(torch.load(file, weights_only=True))
    steps(going_on, resumed, range(3, 5))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(whole[0], parameters(dtype)[0])
