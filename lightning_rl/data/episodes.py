"""The episodes of a packed batch, call by call: what was written when, and what was paid for it."""

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import episode_rows, token_rows


class CallTable(NamedTuple):
    """The C calls of a batch, and its M model tokens, call by call.

    Episodes follow one another, and within each its calls in their order, in whichever rows they
    are: a rollout's are one sequence of decisions (of several roles, each role's).

    ``tokens`` (M,): where the model's tokens are in the batch; ``of_token`` (M,): the call of each;
    ``episode`` (C,), ascending: which episode a call is of; ``place`` (C,): how many it made
    before; ``first`` (C,): where in ``tokens`` it begins.
    """

    tokens: Tensor
    of_token: Tensor
    episode: Tensor
    place: Tensor
    first: Tensor


def call_numbers(batch: TensorDict) -> Tensor:
    """Numbers (T,) that tell an episode's calls apart and order them, -1 outside of any.

    As recorded, or else each stretch of tokens that a model wrote is a call.
    """
    tokens = batch["tokens"]
    if "call" in tokens:
        recorded: Tensor = tokens["call"]
        return recorded
    mask, row = tokens["loss_mask"], token_rows(batch)
    begins = mask.clone()
    begins[1:] &= ~mask[:-1] | (row[1:] != row[:-1])
    return torch.where(mask, begins.cumsum(0) - 1, -1)


def calls_of(batch: TensorDict) -> CallTable:
    """The calls of all episodes, with the tokens that are trained on."""
    live = batch["tokens", "loss_mask"].nonzero().squeeze(1)
    _, of_row = episode_rows(batch).unique(return_inverse=True)
    number, episode = call_numbers(batch)[live], of_row[token_rows(batch)[live]]
    other = episode[1:] != episode[:-1]
    if ((episode[1:] < episode[:-1]) | ~other & (number[1:] < number[:-1])).any():
        # Calls went to and fro between rows. Sorting takes longer than all the rest.
        order = number.argsort(stable=True)
        order = order[episode[order].argsort(stable=True)]
        live, number, episode = live[order], number[order], episode[order]
        other = episode[1:] != episode[:-1]
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[1:] = other | (number[1:] != number[:-1])
    first = begins.nonzero().squeeze(1)
    of_call = episode[first]
    _, inverse, counts = of_call.unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(first), device=first.device) - (counts.cumsum(0) - counts)[inverse]
    return CallTable(live, begins.cumsum(0) - 1, of_call, place, first)


def received(batch: TensorDict, calls: CallTable) -> Tensor:
    """What each token was paid, (T,): an episode's tokens together its reward and token rewards.

    A call's reward falls on its last token. What the episode was paid beyond its calls' rewards
    falls on the last token of its last call: all of it, where no call was paid. So whatever reward
    functions and their weights make of a rollout, its sum is the rollout's reward.
    """
    tokens, rollouts = batch["tokens"], batch["rollouts"]
    reward = rollouts["reward"]
    paid = torch.zeros(len(tokens), dtype=reward.dtype, device=reward.device)
    if "call_reward" in tokens:
        paid = paid + tokens["call_reward"]
    episode = calls.episode[calls.of_token]
    last = torch.ones_like(episode, dtype=torch.bool)
    last[:-1] = episode[1:] != episode[:-1]
    ends = calls.tokens[last]
    _, inverse = episode.unique_consecutive(return_inverse=True)
    own = paid[calls.tokens].double()
    none = torch.zeros(len(ends), dtype=torch.double, device=reward.device)
    total = reward[token_rows(batch)[ends]].double()
    rest = total - none.index_add(0, inverse, own)
    # Of rewards that make up the total, only rounding is left over: that is no reward.
    rounding = torch.finfo(reward.dtype).eps * (total.abs() + none.index_add(0, inverse, own.abs()))
    rest = torch.where(rest.abs() <= rounding, 0.0, rest)
    paid = paid.index_add(0, ends, rest.to(paid.dtype))
    return paid + tokens["token_rewards"].to(paid.dtype) if "token_rewards" in tokens else paid
