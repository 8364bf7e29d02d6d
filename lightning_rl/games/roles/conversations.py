"""Losses of policies that wrote rollouts together, as functions of all that they wrote."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import token_rows
from lightning_rl.errors import DataError
from lightning_rl.games.algos.moves import GameUpdate, game_loss, said_before


def written(minibatch: TensorDict, logprobs: Tensor) -> TensorDict:
    """Return the tokens, [M], that a policy wrote in a minibatch and learns from.

    Columns: ``advantages``, ``loss_weights``, ``old_logprobs`` (the given ``logprobs`` if a batch
    is used for one step only), and ``rollout``, ``episode`` and ``call``, which say when each was
    written.

    Raises:
        DataError: if rollouts did not record their calls.
    """
    if "call" not in minibatch["tokens"]:
        raise DataError(
            "rollouts did not record their calls, but GameRolesModule needs the order in which "
            "tokens were written; have the agent call its models through an Episode"
        )
    live = minibatch["tokens", "loss_mask"].nonzero().squeeze(1)
    tokens = minibatch["tokens"].select("call", "advantages", "loss_weights")[live]
    known = "old_logprobs" in minibatch["tokens"]
    tokens["old_logprobs"] = minibatch["tokens", "old_logprobs"][live] if known else logprobs
    row = token_rows(minibatch)[live]
    for name in ("rollout", "episode"):
        tokens[name] = minibatch["rollouts", name][row]
    return tokens


def conversation_losses(
    update: GameUpdate, players: Sequence[TensorDict], logprobs: Sequence[Tensor]
) -> list[Tensor]:
    """Return each player's loss, a scalar function of all players' ``logprobs``, (M_i,) each.

    Each token is one step of its rollout, in the order of calls. For player i, the loss of its own
    tokens is :meth:`~lightning_rl.games.GameUpdate.step_loss` with their advantages, times
    ``loss_weights``. That of another player's tokens uses player i's advantage in that rollout and
    its mean weight there, since i's reward results from everything that was said, each token
    counting equally. :func:`~lightning_rl.games.algos.moves.game_loss` makes each step depend on
    what was said before. Everything is computed in float64, because thousands of log probabilities
    are summed.
    """
    everything: Any = torch.cat(list(players))  # a TensorDict, as they are
    _, everything["rollout"] = everything["rollout"].unique(return_inverse=True)
    order = everything["call"].argsort(stable=True)
    order = order[everything["rollout"][order].argsort(stable=True)]
    rollout, said = everything["rollout"][order], torch.cat(list(logprobs)).double()[order]
    begins = torch.ones_like(rollout, dtype=torch.bool)
    begins[1:] = rollout[1:] != rollout[:-1]
    before = said_before(said[None], begins[None])
    old = everything["old_logprobs"].detach().double()
    losses, end = [], 0
    for tokens in players:
        begin, end = end, end + len(tokens)
        credit, weight = _credit(everything, slice(begin, end))
        steps = {"advantages": credit[order], "old_logprobs": old[order]}
        loss, _ = update.step_loss(said, steps)
        losses.append(game_loss((loss * weight[order])[None], before) * len(said))
    return losses


def _credit(everything: TensorDict, own: slice) -> tuple[Tensor, Tensor]:
    """Return advantages and weights (M,) of all tokens in the loss of the player that wrote
    ``own``.

    A player with several roles in a rollout gets the sum of their advantages there.
    """
    tokens, rollout = everything[own], everything["rollout"]
    count = int(rollout.max()) + 1 if len(rollout) else 0
    episodes, episode = tokens["episode"].unique(return_inverse=True)
    paid = _means(tokens["advantages"], episode, len(episodes))
    rollout_of = torch.zeros_like(episodes).index_put((episode,), tokens["rollout"])
    advantage = paid.new_zeros(count).index_add(0, rollout_of, paid)[rollout]
    weight = _means(tokens["loss_weights"], tokens["rollout"], count)[rollout]
    advantage[own], weight[own] = tokens["advantages"].double(), tokens["loss_weights"].double()
    return advantage, weight


def _means(values: Tensor, place: Tensor, count: int) -> Tensor:
    """Return means (count,) of ``values`` (M,) by their indices (M,); 0 where there are none."""
    zeros = torch.zeros(count, dtype=torch.double, device=values.device)
    sums = zeros.index_add(0, place, values.double())
    return sums / zeros.index_add(0, place, torch.ones_like(values).double()).clamp(min=1)
