"""Test learning-rate schedules by hand."""

import math

import pytest
import torch

from lightning_rl.errors import ConfigError
from lightning_rl.learn.schedulers import WarmupConstant, WarmupCosine, WarmupLinear


def rates(make, steps: int) -> list[float]:
    """Return learning rates of the first steps, at a base of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_constant_after_warm_up():
    # The first step already moves: (step + 1) / (warmup + 1).
    expected = [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(lambda o: WarmupConstant(o, warmup_steps=3), 6) == pytest.approx(expected)


def test_without_warm_up_the_first_step_is_full():
    assert rates(lambda o: WarmupConstant(o), 2) == [1, 1]


def test_linear_decay():
    expected = [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0, 0]
    made = rates(lambda o: WarmupLinear(o, total_steps=6, warmup_steps=2), 8)
    assert made == pytest.approx(expected)


def test_linear_decay_to_a_floor():
    made = rates(lambda o: WarmupLinear(o, total_steps=4, final=0.2), 6)
    assert made == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay():
    made = rates(lambda o: WarmupCosine(o, total_steps=5, warmup_steps=1, final=0.1), 6)
    half = math.sqrt(0.5)
    shape = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0]
    assert made == pytest.approx([0.5] + [0.1 + 0.9 * s for s in shape])


def test_a_decay_that_ends_before_it_begins_is_refused():
    with pytest.raises(ConfigError, match="total_steps=5 must be > warmup_steps=5"):
        rates(lambda o: WarmupLinear(o, total_steps=5, warmup_steps=5), 1)
