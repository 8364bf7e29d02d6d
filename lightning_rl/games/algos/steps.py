"""Losses of games from steps that were played, of which all derivatives are estimates."""

import torch
from torch import Tensor


def said_before(logprobs: Tensor, begins: Tensor) -> Tensor:
    """Sum of log probabilities of earlier steps of the same episode, (E, T).

    ``logprobs`` (E, T) are of all that players did in each step; ``begins`` (E, T) is where an
    episode begins. The first column begins one, as far as it is known.
    """
    assert logprobs.shape == begins.shape and logprobs.ndim == 2
    before = logprobs.cumsum(1) - logprobs
    steps = torch.arange(logprobs.shape[1], device=logprobs.device)
    begun = torch.where(begins, steps, 0).cummax(1).values
    return before - before.gather(1, begun)


def game_loss(step_losses: Tensor, before: Tensor) -> Tensor:
    """Mean loss of a player, a scalar with the derivatives of its expectation in all players'.

    ``step_losses`` (E, T) are functions of what was done in a step, as
    :meth:`~lightning_rl.games.GameUpdate.step_loss` has them, and ``before`` (E, T) is of
    :func:`said_before`. Of steps l_t the loss is the mean of l_t + (e^(before - sg(before)) - 1)
    (l_t - sg(l_t)). With l_t = -A_t p_t / sg(p_t) and scores S of players f and g its gradient is
    -A_t S_f,t, and its mixed derivative -A_t (S_f,t S_g,<=t + S_f,<t S_g,t): what f does has to do
    with all that g did before, and the other way around (Farquhar et al. 2019, Loaded DiCE).
    """
    assert step_losses.shape == before.shape and before.ndim == 2
    past = (before - before.detach()).exp()
    fixed = step_losses.detach()
    return (fixed + past * (step_losses - fixed)).mean()
