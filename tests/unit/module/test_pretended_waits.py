"""Test how often the host waits for a device in an update: it is to run ahead of it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from lightning_rl import K3Penalty, TokenTIS
from lightning_rl.data.batch import empty_like, host_of, select, with_host
from lightning_rl.data.splitting import split_micro_batches
from tests.support.pretended import DEVICE, moving_in_place, on_the_device, waits
from tests.support.small_run import grpo


def counted(module, batch: TensorDict, train_on, max_tokens: int) -> Counter[str]:
    """Return what the host waited for in an iteration with micro-batches of so many tokens."""
    seen, step = Counter(), module.training_step

    def watched(*given):
        waits.clear()
        step(*given)
        seen.update(waits)

    module.training_step = watched
    module.update = replace(module.update, max_tokens_per_micro_batch=max_tokens)
    with moving_in_place():
        train_on(module, [batch], **on_the_device())
    return seen


def with_penalty(tiny_model):
    return grpo(tiny_model, kl=K3Penalty(), correction=TokenTIS())


@pytest.mark.parametrize(("make", "budget"), [(grpo, 20), (with_penalty, 16)])
def test_no_micro_batch_waits(make, budget, tiny_model, random_batch, train_on):
    """However many micro-batches there are, the host waits as often: per iteration, not for
    each."""
    batch = random_batch(3)
    assert len(split_micro_batches(batch, 30)) == 3
    one, three = (counted(make(tiny_model), batch, train_on, size) for size in (10_000, 30))
    assert one == three
    assert 0 < one.total() <= budget, one


def test_the_host_has_what_decides_a_layout(random_batch):
    batch = random_batch(3)
    assert with_host(batch) is host_of(batch) is batch
    there = batch.to(DEVICE)
    waits.clear()
    hosted = with_host(there)
    assert waits.total() == 2  # one for the rollouts' columns, one for the tokens' mask
    cut = select(select(hosted, torch.tensor([7, 4, 2])), torch.tensor([0, 2]))
    assert waits.total() == 2
    expected = select(batch, torch.tensor([7, 2]))
    for kind in ("tokens", "rollouts"):
        for name, column in cut["host", kind].items():
            assert column.device.type == "cpu"
            assert column.dtype == expected[kind, name].dtype
            assert torch.equal(column, expected[kind, name])
        for name, column in cut[kind].items():
            assert torch.equal(column.cpu(), expected[kind, name])
    nothing = empty_like(hosted)
    assert not nothing["tokens", "loss_mask"].any()
    assert not nothing["host", "tokens", "loss_mask"].any()
