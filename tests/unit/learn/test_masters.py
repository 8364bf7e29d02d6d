"""Test weights in bfloat16 whose optimizer steps float32 copies."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_rl.learn.precision import (
    BFloat16Precision,
    MasterWeights,
    make_optimizer,
    unmoved_share,
)


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return weights of size 0.02 and 1, exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    drawn = (s * torch.randn(3, 40, generator=generator) for s in (0.02, 1.0))
    return [nn.Parameter(x.bfloat16().to(dtype)) for x in drawn]


def steps(optimizer, parameters, numbers) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters:
            noise = torch.rand(parameter.shape, generator=generator)
            gradient = (1 + 0.1 * noise).bfloat16()
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def adamw(parameters):
    return AdamW(parameters, lr=1e-6, weight_decay=0.0)


def test_small_steps_add_up_as_in_float32():
    """A weight between 2^-6 and 2^-5 has neighbours at 2^-13: 123 steps of 1e-6, and none alone."""
    ours, exact, plain = (weights(d) for d in (torch.bfloat16, torch.float32, torch.bfloat16))
    begin = ours[0].detach().clone()
    for optimizer, parameters in (
        (MasterWeights(ours, adamw), ours),
        (adamw(exact), exact),
        (adamw(plain), plain),
    ):
        steps(optimizer, parameters, range(150))
    for weight, float32 in zip(ours, exact, strict=True):
        assert torch.equal(weight, float32.bfloat16())
    between = (begin.abs() > 2**-6) & (begin.abs() < 2**-5)
    assert between.sum() > 20
    assert (ours[0] != begin)[between].all()
    assert (plain[0] == begin)[between].all()


@pytest.mark.parametrize("kind", [adamw, lambda p: SGD(p, lr=1e-3)], ids=["AdamW", "SGD"])
def test_a_resumed_optimizer_goes_on_as_if_never_stopped(kind):
    whole, first = weights(torch.bfloat16), weights(torch.bfloat16)
    optimizer, stopped = MasterWeights(whole, kind), MasterWeights(first, kind)
    steps(optimizer, whole, range(6))
    steps(stopped, first, range(3))
    resumed = [nn.Parameter(w.detach().clone()) for w in first]
    going_on = MasterWeights(resumed, kind)
    going_on.load_state_dict(stopped.state_dict())
    steps(going_on, resumed, range(3, 6))
    theirs, ours = optimizer.state_dict()["state"], going_on.state_dict()["state"]
    assert theirs.keys() == ours.keys() == {0, 1}
    for place, state in theirs.items():
        assert state["master_weight"].dtype is torch.float32
        for name, value in state.items():
            assert ours[place][name] is value is None or torch.equal(ours[place][name], value)
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a, b)


def test_weights_that_come_later_are_those_that_are_stepped():
    """Sharded strategies load weights, and then make a step of zeros to find the state's shape."""
    net, late = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).bfloat16()
    optimizer = MasterWeights(net.parameters(), adamw)
    steps(optimizer, list(net.parameters()), range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    going_on = MasterWeights(late.parameters(), adamw)
    late.load_state_dict(net.state_dict())
    set_optimizer_state_dict(late, going_on, saved)
    for a, b in zip(net.parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b)
    steps(optimizer, list(net.parameters()), range(3, 5))
    steps(going_on, list(late.parameters()), range(3, 5))
    ours, theirs = going_on.state_dict()["state"], optimizer.state_dict()["state"]
    for place in (0, 1):
        assert torch.equal(ours[place]["master_weight"], theirs[place]["master_weight"])


def test_schedules_and_groups_reach_the_copies():
    slow, fast = weights(torch.bfloat16)
    optimizer = MasterWeights(
        [{"params": [slow], "lr": 0.0}, {"params": [fast]}], lambda g: SGD(g, lr=0.5)
    )
    schedule = LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    begin = [slow.detach().clone(), fast.detach().clone()]
    for moves in (True, False):
        slow.grad, fast.grad = torch.ones_like(slow), torch.ones_like(fast)
        optimizer.step()
        schedule.step()
        assert torch.equal(slow, begin[0])
        expected = (begin[1].float() - 0.5).bfloat16()  # the second step has rate 0
        assert torch.equal(fast, expected), moves


def test_what_has_no_gradient_stays_and_float32_is_stepped_as_it_is():
    half, full = weights(torch.bfloat16)[0], weights(torch.float32)[1]
    optimizer = MasterWeights([half, full], lambda p: SGD(p, lr=1.0))
    before = half.detach().clone()
    full.grad = torch.ones_like(full)
    expected = full.detach() - 1
    optimizer.step()
    assert torch.equal(half, before)
    assert torch.equal(full, expected)
    assert optimizer.state_dict()["state"] == {}  # SGD has none, and the one has no copy


def test_a_learning_rate_that_bfloat16_rounds_away_is_warned_of(caplog):
    """1 has neighbours at 1 + 2^-7: half of that, 0.0039, is the least that moves it upwards."""
    one = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    assert unmoved_share(SGD([one], lr=0.003)) == 1
    assert unmoved_share(SGD([one], lr=0.005)) == 0
    assert unmoved_share(SGD([nn.Parameter(torch.ones(4))], lr=1e-6)) == 0
    plugin = BFloat16Precision(master_weights=False)
    module = SimpleNamespace(trainer=SimpleNamespace(precision_plugin=plugin))
    with caplog.at_level(logging.WARNING):
        made = make_optimizer(module, lambda p: SGD(p, lr=0.003), [one])
    assert isinstance(made, SGD)
    assert "0.003, is rounded to nothing for 100 % of the weights" in caplog.text
    module.trainer.precision_plugin = BFloat16Precision()
    assert isinstance(make_optimizer(module, lambda p: SGD(p, lr=0.003), [one]), MasterWeights)


def test_only_parameters_are_rounded():
    """A rotary embedding's frequencies in bfloat16 are off by a turn after 400 positions."""
    module = nn.Linear(2, 2)
    module.register_buffer("inv_freq", torch.tensor([1.0, 0.7]))
    BFloat16Precision().convert_module(module)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert torch.equal(module.inv_freq, torch.tensor([1.0, 0.7]))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_nothing_changes_in_float32(kind):
    ours, theirs = weights(torch.float32), weights(torch.float32)
    steps(MasterWeights(ours, lambda p: kind(p, lr=0.1)), ours, range(3))
    steps(kind(theirs, lr=0.1), theirs, range(3))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
