"""Test what memory holds at each moment of an update, calculated by hand."""

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_rl import NF4, LoRA
from lightning_rl.cli.check import tracking
from lightning_rl.cli.check.batches import largest_rollouts
from lightning_rl.cli.check.gathering import (
    HEAD,
    HEAD_BACKWARD,
    LAYER,
    LAYER_BACKWARD,
    REDUCED,
    Gathering,
    Group,
)
from lightning_rl.cli.check.memory import training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.cli.check.tracking import COPIES, GRADIENTS, STATES, Moment, Tracker, follow
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.tiny_models import save_random_model

USED = {
    (LAYER, False): 50,
    (HEAD, False): 60 + 20,
    (HEAD_BACKWARD, False): 70 + 10 + 3,
    (LAYER_BACKWARD, False): 90 + 5,
    (LAYER_BACKWARD, True): 55 + 5,
    (REDUCED, True): 40 + 9,
}
"""The memory of a pass beside weights, by moment, and whether another backward pass is over."""


def totals(gathering: Gathering) -> list[float]:
    return [used + sum(gathering.held(*at).values()) for at, used in USED.items()]


def test_shared_weights_are_gathered_layer_by_layer():
    outside, layer = Group(100, 200, 2), Group(10, 20, 2)
    plain = Gathering(outside, layer, Group(0, 0, 2), 2)
    assert totals(plain) == [
        50 + 100 + 10 + 10,  # its weights, and the message that they came in
        60 + 20 + 100 + 10,  # the message of the last layer
        70 + 10 + 3 + 100 + 10,  # the last layer's, gathered ahead
        90 + 5 + 100 + 10 + 10,  # its weights, and the message of the one before
        55 + 5 + 100 + 10 + 10 + 20,  # and the gradients of the one after it, in a message
        40 + 9 + 100 + 10 + 20,  # its weights are gone, its gradients in a message
    ]
    # Experts that processes have together come in a message of their own, after their layer's.
    experts = Gathering(outside, layer, Group(30, 60, 1), 2)
    both = Gathering(outside, layer, Group(30, 60, 2), 2)
    # What has no other process to come from comes in none.
    assert [a - b for a, b in zip(totals(experts), totals(plain), strict=True)] == [
        30 - 10, -10, 0, 30, 30, 0,
    ]  # fmt: skip
    assert [a - b for a, b in zip(totals(both), totals(experts), strict=True)] == [
        30, 30, 0, 0, 0, 0,
    ]  # fmt: skip


def test_gradients_of_a_large_vocabulary_are_summed_last(tmp_path):
    """They are whole in float32 outside of layers, and in the message that they go in."""
    save_random_model(tmp_path, make_tokenizer(), vocab_size=1 << 14, tie_word_embeddings=False)
    micro_batch = pack_rollouts(largest_rollouts([Prompt("0", "", [2])], 1, 1, 2))
    placement = Placement(precision="bf16-mixed", shards=2)
    plan = training_memory(Policy(str(tmp_path)), [], torch.optim.SGD, micro_batch, placement)
    assert plan.moment == REDUCED
    outside = 4 * (2 * (1 << 14) * 64 + 64)
    assert plan.parts["whole gradients"] == plan.parts["gradients in a message"] == outside


class Head(nn.Linear):
    """A model that is nothing but a head."""

    @property
    def lm(self) -> "Head":
        return self

    def get_output_embeddings(self) -> "Head":
        return self


def test_storages_are_followed_until_they_are_let_go():
    policy = Head(4, 3, bias=False)
    with torch.enable_grad(), Tracker(policy) as found:
        states = torch.ones(5, 4)
        product = states @ policy.weight.T
        view = product.view(-1)
        assert found.now == {STATES: 5 * 4 * 4 + 5 * 3 * 4}  # a view has no memory of its own
        del product
        assert found.now == {STATES: 5 * 4 * 4 + 5 * 3 * 4}
        found.turned = True
        view.sum().backward()
        assert found.now[COPIES] == 3 * 4 * 4
        found.count_as(policy.weight.grad, GRADIENTS)
        assert found.now[GRADIENTS] == 3 * 4 * 4
        del view, states
        assert +Counter(found.now) == {GRADIENTS: 3 * 4 * 4}
    # There was the sum, too, and its gradient, which is the same for all elements.
    assert found.peak.parts[STATES] >= 5 * 4 * 4 + 5 * 3 * 4 + 4


def test_the_largest_moment_is_remembered():
    found = Tracker(Head(4, 3), shares={"a": 0.5})
    found.add(6, "a")
    assert found.peak == Moment(LAYER, {"a": 3})
    found.begin(HEAD, {"b": 4})
    found.add(-6, "a")
    found.add(2, "b")
    assert found.peak == Moment(HEAD, {"a": 3, "b": 4})


@pytest.fixture(scope="module")
def micro_batch():
    return pack_rollouts(largest_rollouts([Prompt("0", "", [2, 3])], 1, 4, 20))


def test_unpacked_weights_do_not_grow_with_tokens(tiny_model, micro_batch, monkeypatch):
    """Unpacking a matrix of 64 x 64 in few bits takes no activation."""

    class Seen(Tracker):
        most: Counter

        def add(self, size, kind):
            super().add(size, kind)
            self.most = getattr(self, "most", Counter()) | Counter(self.now)

    monkeypatch.setattr(tracking, "Tracker", Seen)
    plain, packed = (
        follow(Policy(str(tiny_model), lora=LoRA(rank=4, quantization=form)), micro_batch)
        for form in (None, NF4())
    )
    assert packed.most[COPIES] >= 4 * 64 * 64
    assert packed.kept <= 1.02 * plain.kept
    assert packed.most[STATES] <= 1.02 * plain.most[STATES]


def test_a_policy_is_left_as_it_was(tiny_model, micro_batch):
    policy = Policy(str(tiny_model), loading={"gradient_checkpointing": True})
    weight = next(policy.parameters())
    weight.grad = torch.ones_like(weight)
    follow(policy, micro_batch)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in policy.parameters() if p is not weight)
    assert not any(layer._forward_hooks for layer in policy.lm.model.layers)
