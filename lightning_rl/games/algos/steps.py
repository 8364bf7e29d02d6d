"""Losses of games, estimated from played steps so that all their derivatives are estimates, too."""

import torch
from torch import Tensor


def said_before(logprobs: Tensor, begins: Tensor) -> Tensor:
    """Sum the log probabilities of earlier steps of the same episode, (E, T).

    ``logprobs`` (E, T) are joint over all players in each step; ``begins`` (E, T) is True where an
    episode begins. The first column counts as the beginning of one.
    """
    assert logprobs.shape == begins.shape and logprobs.ndim == 2
    before = logprobs.cumsum(1) - logprobs
    steps = torch.arange(logprobs.shape[1], device=logprobs.device)
    begun = torch.where(begins, steps, 0).cummax(1).values
    return before - before.gather(1, begun)


def game_loss(step_losses: Tensor, before: Tensor) -> Tensor:
    """Return a player's mean loss, a scalar with the derivatives of its expectation in all players'
    parameters.

    ``step_losses`` (E, T) are functions of the actions in each step, as
    :meth:`~lightning_rl.games.GameUpdate.step_loss` returns them, and ``before`` (E, T) comes from
    :func:`said_before`. For steps l_t the loss is the mean of l_t + (e^(before - sg(before)) - 1)
    (l_t - sg(l_t)). With l_t = -A_t p_t / sg(p_t) and scores S of players f and g its gradient is
    -A_t S_f,t, and its mixed derivative -A_t (S_f,t S_g,<=t + S_f,<t S_g,t): each player's action
    interacts with all that the other did before (Farquhar et al. 2019, Loaded DiCE).
    """
    assert step_losses.shape == before.shape and before.ndim == 2
    past = (before - before.detach()).exp()
    fixed = step_losses.detach()
    return (fixed + past * (step_losses - fixed)).mean()
