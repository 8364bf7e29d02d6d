"""Memory too small for a micro-batch: the gradient is the same, and nothing is counted twice."""

import logging

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rl.algos.kl import K3Penalty
from lightning_rl.algos.losses import PPOClip
from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import MicroBatchMemoryError
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.memory import forward_tokens, is_out_of_memory, smaller_budget
from lightning_rl.models.policy import Policy
from lightning_rl.module import PolicyModule
from tests.support.tolerances import gradient_rounding, scores_rounding
from tests.support.updates import assert_close, last_gradients

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
    """Really runs out of memory with more than ``limit`` loss tokens in a micro-batch."""

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
    """Take one step of SGD; return its gradient and metrics."""
    recorded = Recorded()
    module = PolicyModule(
        str(tiny_model),
        loss=Hungry(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        update={"max_grad_norm": None, "max_tokens_per_micro_batch": budget},
    )
    train_on(module, [batch.clone()], callbacks=[recorded])
    return last_gradients(module), recorded.row


@pytest.mark.parametrize(
    ("in_backward", "budget", "limit"), [(False, 10_000, 12), (True, 10_000, 30), (True, 60, 12)]
)
def test_the_gradient_is_that_of_the_whole_micro_batch(
    tiny_model, train_on, random_batch, monkeypatch, caplog, in_backward, budget, limit
):
    batch = random_batch(12, groups=5)
    wanted, row = train(tiny_model, train_on, batch)
    monkeypatch.setattr(Hungry, "limit", limit)
    monkeypatch.setattr(Hungry, "in_backward", in_backward)
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        ours, our_row = train(tiny_model, train_on, batch, budget)
    assert_close(ours, wanted, gradient_rounding(tiny_model, len(batch["tokens"])))
    # The micro-batches that worked out before the one that did not are done again, and count once.
    assert our_row == pytest.approx(row, rel=1e-5, abs=1e-7)
    assert "out of memory with" in caplog.text
    assert "Lower model.update.max_tokens_per_micro_batch" in caplog.text


def test_a_rollout_that_does_not_fit_is_named(tiny_model, train_on, random_batch, monkeypatch):
    monkeypatch.setattr(Hungry, "limit", 0)
    message = (
        r"a rollout of \d+ tokens does not fit into memory by itself; lower data.sampling."
        r"max_tokens, or set model.loading.gradient_checkpointing=true \(.*memory"
    )
    with pytest.raises(MicroBatchMemoryError, match=message):
        train(tiny_model, train_on, random_batch(12))


def test_another_error_is_not_taken_for_it(random_batch):
    error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError) as raised:
        smaller_budget(random_batch(1), error)
    assert raised.value is error
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))


def test_half_of_the_tokens_of_the_micro_batch(make_rollout):
    shared = [make_rollout([3, 4, 5], [6, 1]), make_rollout([3, 4, 5], [6, 7, 1])]
    batch = pack_rollouts([*shared, make_rollout([8], [9, 1])])
    # The shared prompt once: 3 + 2 + 3, then 1 + 2.
    assert forward_tokens(batch) == 11
    assert smaller_budget(batch, RuntimeError("out of memory")) == 5
    assert forward_tokens(select(batch, torch.tensor([0, 1]))) == 8


class HungryPolicy(Policy):
    """Runs out of memory without gradients, with more than ``limit`` tokens in a micro-batch."""

    limit = 10**9
    failures = 0

    def forward(self, micro_batch):
        if not torch.is_grad_enabled() and forward_tokens(micro_batch) > self.limit:
            HungryPolicy.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(micro_batch)


class HungryModule(PolicyModule):
    """A module whose policy and reference are hungry."""

    def configure_model(self) -> None:
        super().configure_model()
        for policy in (self.policy, self.reference.policy):
            policy.__class__ = HungryPolicy


@pytest.mark.parametrize("limit", [60, 20, 15])
def test_scores_are_those_of_whole_micro_batches(
    tiny_model, random_batch, monkeypatch, caplog, limit
):
    policy = HungryPolicy(str(tiny_model), SharedValueHead())
    torch.nn.init.normal_(policy.value_head.linear.weight, std=0.1)
    batch, rows = random_batch(12, groups=5), torch.tensor([0, 2, 3, 5, 6, 7, 8, 10, 11])
    whole = policy.score(batch.clone(), "scored", 10_000, rows)["tokens"]
    monkeypatch.setattr(HungryPolicy, "limit", limit)
    monkeypatch.setattr(HungryPolicy, "failures", 0)
    ours = policy.score(batch.clone(), "scored", 10_000, rows)["tokens"]
    assert HungryPolicy.failures >= 1
    assert caplog.text.count("out of memory with") == HungryPolicy.failures
    for name in ("scored", "values"):
        assert float(whole[name].abs().max()) > 0.1
        bound = scores_rounding(tiny_model, whole[name])
        torch.testing.assert_close(ours[name], whole[name], rtol=0, atol=bound)


def test_old_and_reference_logprobs_do_not_stop_a_run(
    tiny_model, train_on, random_batch, monkeypatch
):
    """Two updates per batch, so that the old logprobs are scored, and a reference."""

    def weights():
        module = HungryModule(str(tiny_model), update={"ppo_epochs": 2}, kl=K3Penalty(0.1),
                              optimizer=lambda p: torch.optim.SGD(p, lr=0.1))  # fmt: skip
        train_on(module, [random_batch(12, groups=5)])
        return dict(module.policy.named_weights())

    whole = weights()
    monkeypatch.setattr(HungryPolicy, "limit", 30)
    monkeypatch.setattr(HungryPolicy, "failures", 0)
    ours = weights()
    assert HungryPolicy.failures >= 2  # in each of both passes
    for name, weight in whole.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6, msg=name)


def test_a_rollout_that_cannot_be_scored_is_named(tiny_model, random_batch, monkeypatch):
    policy = HungryPolicy(str(tiny_model))
    monkeypatch.setattr(HungryPolicy, "limit", 0)
    with pytest.raises(
        MicroBatchMemoryError, match=r"a rollout of \d+ tokens does not fit .* of memory"
    ):
        policy.score(random_batch(4), "scored", 10_000)
