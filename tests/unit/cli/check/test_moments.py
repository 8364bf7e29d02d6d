"""What is there at each moment of an update, calculated by hand."""

import pytest
import torch
from torch import nn

from lightning_rl import NF4, LoRA
from lightning_rl.cli.check.activations import follow
from lightning_rl.cli.check.allocations import Allocations, Held, largest
from lightning_rl.cli.check.batches import largest_rollouts
from lightning_rl.cli.check.moments import Alone, Group, Sharded, Sizes
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt

HELD = {
    "forward": Held(50),
    "scored": Held(60, logits=20),
    "head": Held(70, logits=10, copies=3),
    "last": Held(90, copies=1, gradients=4),
    "others": Held(55, copies=1, gradients=4, summed=8),
    "ends": Held(40, gradients=9),
}


def sizes(earlier: bool) -> Sizes:
    return Sizes("activations", lambda part, size: HELD[part], 16, 5, earlier)


def totals(sharing, earlier: bool) -> list[int]:
    return [moment.total for moment in sharing.moments(sizes(earlier))]


def test_a_process_alone_adds_gradients_up_where_they_stay():
    # A layer computes; the head, forward and backward; the last layer, and others; the step.
    assert totals(Alone(), earlier=True) == [66, 96, 99, 107, 72, 21]
    # In the first pass gradients are those that it has left so far: 4, and 4 + 8.
    assert totals(Alone(), earlier=False) == [50, 80, 83, 95, 68, 21]


def test_shared_weights_are_gathered_layer_by_layer():
    outside, layer = Group(100, 200, 2), Group(10, 20, 2)
    plain = Sharded(outside, layer, Group(0, 0, 2), 2)
    assert totals(plain, earlier=True) == [
        16 + 50 + 100 + 10 + 10,  # its weights, and the message that they came in
        16 + 60 + 20 + 100 + 10,  # the message of the last layer
        16 + 70 + 10 + 3 + 100 + 10,  # the last layer's, gathered ahead
        16 + 90 + 5 + 100 + 10 + 10,  # its weights, and the message of the one before
        16 + 55 + 5 + 100 + 10 + 10 + 20,  # and the gradients of the one after it, in a message
        16 + 40 + 9 + 100 + 10 + 20,  # its weights are gone, its gradients in a message
        16 + 200 + 200,  # all that is outside of layers, at the end
        16 + 5,
    ]
    # Experts that processes have together come in a message of their own, after their layer's.
    experts = Sharded(outside, layer, Group(30, 60, 1), 2)
    both = Sharded(outside, layer, Group(30, 60, 2), 2)
    # What has no other process to come from comes in none.
    assert [a - b for a, b in zip(*(totals(x, True) for x in (experts, plain)), strict=True)] == [
        30 - 10, -10, 0, 30, 30, 0, 0, 0,
    ]  # fmt: skip
    assert [a - b for a, b in zip(*(totals(x, True) for x in (both, experts)), strict=True)] == [
        30, 30, 0, 0, 0, 0, 0, 0,
    ]  # fmt: skip
    # In the first pass a process has its part of those that are summed: 8 / 2.
    assert totals(plain, earlier=False)[3:5] == [90 + 5 + 120, 55 + 5 + 4 + 140]


def test_storages_are_followed_until_they_are_let_go():
    weight = nn.Parameter(torch.ones(3, 4))
    before = {weight.untyped_storage()._cdata}
    with torch.enable_grad(), Allocations(before, {weight.shape}, set(), 7, None) as found:
        states = torch.ones(5, 4)
        product = states @ weight.T
        view = product.view(-1)
        assert found.now == Held(5 * 4 * 4 + 5 * 3 * 4)  # a view has no memory of its own
        del product
        assert found.now.states == 5 * 4 * 4 + 5 * 3 * 4
        found.turned = True
        view.sum().backward()
        found.count_as(weight.grad, "gradients")
        assert found.now.gradients == 3 * 4 * 4
        del view, states
        assert found.now == Held(gradients=3 * 4 * 4)
    # There was the sum, too, and its gradient, which is the same for all elements.
    assert max(held.grows for held in found.begin()) == 5 * 4 * 4 + 5 * 3 * 4 + 4 + 4


def test_only_what_may_be_the_most_is_remembered():
    points = [Held(3, copies=1), Held(1, copies=2), Held(2), Held(3, copies=1), Held(0, summed=1)]
    assert largest(points) == (Held(3, copies=1), Held(1, copies=2), Held(0, summed=1))


@pytest.fixture(scope="module")
def pack():
    return pack_rollouts(largest_rollouts([Prompt("0", "", [2, 3])], 1, 4, 20))


def test_unpacked_weights_do_not_grow_with_tokens(tiny_model, pack):
    """Of a matrix of 64 x 64 in few bits, what unpacking takes is no activation."""
    plain, packed = (
        follow(Policy(str(tiny_model), lora=LoRA(rank=4, quantization=form)), pack)
        for form in (None, NF4())
    )
    assert max(held.copies for held in packed.most["forward"]) >= 4 * 64 * 64
    assert max(held.states for held in packed.most["forward"]) <= 1.02 * max(
        held.states for held in plain.most["forward"]
    )


def test_a_policy_is_left_as_it_was(tiny_model, pack):
    policy = Policy(str(tiny_model), gradient_checkpointing=True)
    weight = next(policy.parameters())
    weight.grad = torch.ones_like(weight)
    follow(policy, pack)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in policy.parameters() if p is not weight)
    assert not any(layer._forward_hooks for layer in policy.lm.model.layers)
