"""Test losses of rollouts that several wrote: what a token counts for, by hand."""

import math
from functools import partial

import torch
from tensordict import TensorDict

from lightning_rl.games import LOLA, POLA
from lightning_rl.games.roles.conversations import conversation_losses


def tokens(rollout, call, advantage, weight, episode=None, old=-1.0):
    columns = {
        "rollout": torch.tensor(rollout),
        "episode": torch.tensor(rollout if episode is None else episode),
        "call": torch.tensor(call),
        "advantages": torch.tensor(advantage),
        "loss_weights": torch.tensor(weight),
        "old_logprobs": torch.full((len(rollout),), old),
    }
    return TensorDict(columns, batch_size=[len(rollout)])


def derivatives(update, players, logprobs):
    """Differentiate each player's loss by the log probabilities of all, once and twice."""

    def loss(number, *given):
        return conversation_losses(update, players, given)[number]

    slopes, bends = [], []
    for number in range(len(players)):
        slope = torch.autograd.functional.jacobian(partial(loss, number), tuple(logprobs))
        bend = torch.autograd.functional.hessian(partial(loss, number), tuple(logprobs))
        slopes.append(torch.cat(slope))
        bends.append(torch.cat([torch.cat(row, 1) for row in bend]))
    return slopes, bends


def test_what_one_is_paid_for_all_have_said_by_hand():
    # The first wrote calls 0 and 2 of rollout 1, call 1 of rollout 0; the second all others.
    first = tokens([1, 1, 0], [0, 2, 1], [2.0, 2.0, -1.0], [0.5, 0.5, 0.25])
    second = tokens([0, 1], [0, 1], [3.0, 5.0], [1.0, 1.0])
    slopes, bends = derivatives(LOLA(), [first, second], [torch.full((3,), -1.0), torch.zeros(2)])
    # minus advantage times weight, in the other's tokens too: 2 * 0.5 and -1 * 0.25; 5 and 3
    one, other = torch.tensor([-1.0, -1.0, 0.25, 0.25, -1.0]), torch.tensor([-5.0, -5, -3, -3, -5])
    rollout = torch.tensor([1, 1, 0, 0, 1])
    same = rollout[:, None] == rollout
    for slope, bend, expected in zip(slopes, bends, (one, other), strict=True):
        torch.testing.assert_close(slope, expected)
        torch.testing.assert_close(bend, expected[:, None] * same)


def test_what_is_clipped_counts_no_more_but_what_follows_it_does_by_hand():
    first = tokens([0, 0], [0, 2], [1.0, 1.0], [1.0, 1.0])
    second = tokens([0], [1], [1.0], [1.0])
    logprobs = [torch.tensor([-1.0, -1.0]) + torch.tensor([0.0, 0.1]), torch.tensor([0.0])]
    slopes, bends = derivatives(POLA(), [first, second], logprobs)
    # In time the ratios are 1, e, e^0.1: the middle one is above 1.2.
    last = -math.exp(0.1)
    torch.testing.assert_close(slopes[0], torch.tensor([-1.0, last, 0.0]))
    expected = torch.tensor([[-1.0, last, 0.0], [last, last, last], [0.0, last, 0.0]])
    torch.testing.assert_close(bends[0], expected)


def test_a_policy_of_two_roles_is_paid_for_both_by_what_others_say():
    both = tokens([0, 0], [0, 2], [1.0, 2.0], [0.5, 0.25], episode=[0, 1])
    other = tokens([0], [1], [1.0], [1.0])
    slopes, _ = derivatives(LOLA(), [both, other], [torch.zeros(2), torch.zeros(1)])
    torch.testing.assert_close(slopes[0], torch.tensor([-0.5, -0.5, -3 * 0.375]))


def test_who_has_nothing_left_to_learn_from_is_no_hindrance():
    first = tokens([0, 0], [0, 2], [1.0, 1.0], [0.5, 0.5])
    logprobs = [torch.zeros(2, requires_grad=True), torch.zeros(0, requires_grad=True)]
    one, other = conversation_losses(LOLA(), [first, first[:0]], logprobs)
    slopes = torch.autograd.grad(one, logprobs, retain_graph=True)
    assert [slope.tolist() for slope in slopes] == [[-0.5, -0.5], []]
    assert not torch.autograd.grad(other, logprobs[0])[0].any()
    assert len(conversation_losses(LOLA(), [first[:0]], [torch.zeros(0)])) == 1
