"""Test any of torch's learning-rate schedules, and what is none, before a run steps it."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim import SGD, lr_scheduler

from lightning_rl.errors import ConfigError
from lightning_rl.learn.schedulers import (
    check_scheduler,
    make_scheduler,
    step_plateaus,
    step_scheduler,
)

MADE = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.5),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.OneCycleLR(o, 0.1, total_steps=6)], [3]
    ),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
    "ReduceLROnPlateau": partial(ReduceLROnPlateau, monitor="reward/mean", mode="max", patience=0),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
}
optimizer = partial(SGD, lr=1.0, momentum=0.9)


def test_all_of_torch_are_tried():
    assert set(MADE) | {"LRScheduler"} == set(lr_scheduler.__all__)


@pytest.mark.parametrize("name", MADE)
def test_it_makes_as_many_steps_as_it_was_tried_for(name):
    """Those that end are refused one step later, and no others."""
    made = make_scheduler(MADE[name], optimizer([torch.nn.Parameter(torch.zeros(1))]))
    check_scheduler(MADE[name], optimizer, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):
            step_scheduler(made)
    if name in ("OneCycleLR", "SequentialLR"):
        with pytest.raises(ConfigError, match=r"run takes up to 40 steps, and the schedule ends"):
            check_scheduler(MADE[name], optimizer, 40)
    else:
        check_scheduler(MADE[name], optimizer, 40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: None, "lr_scheduler returned None, which is no"),
        (lambda o: o, "lr_scheduler returned SGD"),
        (lr_scheduler.ReduceLROnPlateau, "set class_path: lightning.pytorch.cli.ReduceLROnPlateau"),
    ],
)
def test_what_is_no_schedule_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        check_scheduler(make, optimizer, 1)


def test_a_plateau_steps_when_its_metric_was_recorded():
    own = optimizer([torch.nn.Parameter(torch.zeros(1))])
    made = make_scheduler(MADE["ReduceLROnPlateau"], own)
    for row in ({"reward/mean": 1.0}, {"other": 5.0}, {"reward/mean": float("nan")}):
        step_plateaus([made, None], row)
    assert own.param_groups[0]["lr"] == 1.0
    step_plateaus([made], {"reward/mean": 0.5})
    assert own.param_groups[0]["lr"] == pytest.approx(0.1)
