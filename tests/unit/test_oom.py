"""Memory that is too small for a pack: the gradient is the same, and nothing is counted twice."""

import logging

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rl.algos.losses import PPOClip
from lightning_rl.data.packing import pack_rollouts, select
from lightning_rl.errors import PackMemoryError
from lightning_rl.memory import forward_tokens, is_out_of_memory, smaller_budget
from lightning_rl.module import PolicyModule
from tests.unit.test_update import assert_close, last_gradients

ABSURD = 2**50  # bytes that no machine has


class _Backward(torch.autograd.Function):
    """The identity, with a backward pass that asks for too much."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ABSURD, dtype=torch.uint8)
        return gradient


class Hungry(PPOClip):
    """Really runs out of memory with more than ``limit`` loss tokens in a pack."""

    limit, in_backward = 10**9, False

    def __call__(self, logprobs, tokens):
        if len(logprobs) > self.limit:
            if not self.in_backward:
                torch.empty(ABSURD, dtype=torch.uint8)
            logprobs = _Backward.apply(logprobs)
        return super().__call__(logprobs, tokens)


class Recorded(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.row = pl_module.recorded


def train(tiny_model, train_on, batch, budget=10_000):
    """One step of SGD; its gradient and metrics."""
    recorded = Recorded()
    module = PolicyModule(
        str(tiny_model),
        loss=Hungry(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        max_grad_norm=None,
        max_tokens_per_pack=budget,
    )
    train_on(module, [batch.clone()], callbacks=[recorded])
    return last_gradients(module), recorded.row


@pytest.mark.parametrize(
    ("in_backward", "budget", "limit"), [(False, 10_000, 12), (True, 10_000, 30), (True, 60, 12)]
)
def test_the_gradient_is_that_of_the_whole_pack(
    tiny_model, train_on, random_batch, monkeypatch, caplog, in_backward, budget, limit
):
    batch = random_batch(12, groups=5)
    wanted, row = train(tiny_model, train_on, batch)
    monkeypatch.setattr(Hungry, "limit", limit)
    monkeypatch.setattr(Hungry, "in_backward", in_backward)
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        ours, our_row = train(tiny_model, train_on, batch, budget)
    assert_close(ours, wanted, 1e-6)
    # The packs that worked out before the one that did not are done again, and count once.
    assert our_row == pytest.approx(row, rel=1e-5, abs=1e-7)
    assert "out of memory with" in caplog.text
    assert "Lower model.max_tokens_per_pack" in caplog.text


def test_a_rollout_that_does_not_fit_is_named(tiny_model, train_on, random_batch, monkeypatch):
    monkeypatch.setattr(Hungry, "limit", 0)
    message = (
        r"a rollout of \d+ tokens does not fit into memory by itself; lower data.sampling."
        r"max_tokens, or set model.gradient_checkpointing=true \(.*memory"
    )
    with pytest.raises(PackMemoryError, match=message):
        train(tiny_model, train_on, random_batch(12))


def test_another_error_is_not_taken_for_it(random_batch):
    error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError) as raised:
        smaller_budget(random_batch(1), error)
    assert raised.value is error
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))


def test_half_of_the_tokens_of_the_pack(make_rollout):
    shared = [make_rollout([3, 4, 5], [6, 1]), make_rollout([3, 4, 5], [6, 7, 1])]
    batch = pack_rollouts([*shared, make_rollout([8], [9, 1])])
    # The shared prompt once: 3 + 2 + 3, then 1 + 2.
    assert forward_tokens(batch) == 11
    assert smaller_budget(batch, RuntimeError("out of memory")) == 5
    assert forward_tokens(select(batch, torch.tensor([0, 1]))) == 8
