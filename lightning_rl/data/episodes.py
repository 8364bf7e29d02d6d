"""The episodes of a packed batch, call by call: who wrote each token, and its reward."""

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import episode_rows, token_rows


class CallTable(NamedTuple):
    """The C calls of a batch, and its M model tokens, call by call.

    Episodes follow one another, each with its calls in order, whichever rows they are in: a
    rollout's calls are one sequence of decisions (with several roles, one per role).

    ``tokens`` (M,): indices of the model's tokens in the batch; ``of_token`` (M,): the call of
    each; ``episode`` (C,), ascending: the episode of each call; ``place`` (C,): number of earlier
    calls in the episode; ``first`` (C,): where in ``tokens`` the call begins.
    """

    tokens: Tensor
    of_token: Tensor
    episode: Tensor
    place: Tensor
    first: Tensor


def call_numbers(batch: TensorDict) -> Tensor:
    """Return numbers (T,) that order an episode's calls, -1 outside of any.

    Calls are those recorded, or else each stretch of tokens that a model wrote.
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
    """Return the calls of all episodes, with the tokens that are trained on."""
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
    """Return the reward paid at each token, (T,), including token rewards.

    A call's reward falls on its last token. The rest of the episode's reward, all of it if no call
    has one, falls on the last token of its last call. So however reward functions and their weights
    score a rollout, the sum is the rollout's reward.
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
