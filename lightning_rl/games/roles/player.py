"""PolicyPlayer: a policy as a player in a game, by what it makes of the tokens that it wrote."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algos.losses import Metrics, PolicyLoss
from lightning_rl.algos.objective import Objective
from lightning_rl.data.batch import token_rows, with_host
from lightning_rl.games.algos.game import flat
from lightning_rl.games.algos.scores import GamePlayer
from lightning_rl.games.roles.group import SharedModelGroup
from lightning_rl.learn.left_out import without
from lightning_rl.run.metrics import TokenMetrics

_REACH = 0.03
"""Log probabilities bend within a fraction of the weights' norm; thrice as far does as well."""


@dataclass(frozen=True)
class _Scores(PolicyLoss):
    """log p: with weights w its gradient is J^T w."""

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        return logprobs, {}


class PolicyPlayer(GamePlayer):
    """A policy and the minibatch of rollouts that it learns from.

    Slopes along a direction are central differences: the weights are moved both ways, and put back
    as they were to the bit. How far is what makes the least error of rounding and curvature
    together: in proportion to their norm, and to eps^(1/3) of the precision eps of their numbers.

    Args:
        group: the policy.
        minibatch: packed; of its loss tokens are the M log probabilities.
        objective: the policy's own.
    """

    def __init__(
        self, group: SharedModelGroup, minibatch: TensorDict, objective: Objective
    ) -> None:
        self.group, self.minibatch, self.objective = group, minibatch, objective
        self._live = minibatch["tokens", "loss_mask"].nonzero().squeeze(1)
        optimizer = group.own_optimizer()
        moving = [
            (p, g["lr"]) for g in optimizer.param_groups for p in g["params"] if p.requires_grad
        ]
        self.parameters: Sequence[nn.Parameter] = [p for p, _ in moving]
        self.rates = torch.cat([p.new_full((p.numel(),), lr) for p, lr in moving])

    def logprobs(self) -> Tensor:
        """l, (M,), of the weights as they are."""
        batch = self.group.loaded_policy.score(
            self.minibatch.copy(), "logprobs", self.group.max_tokens_per_pack
        )
        found: Tensor = batch["tokens", "logprobs"][self._live]
        return found

    def own(self) -> Tensor:
        """The gradient, (D,), of the objective."""
        self.group.accumulate(self.minibatch.copy(), self.objective, TokenMetrics())
        return self.taken()

    def taken(self) -> Tensor:
        """The gradient, (D,), that is in the policy, which is left without."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.group.loaded_policy.zero_grad()
        return flat(found)

    def give(self, direction: Tensor) -> None:
        """Leave a direction (D,) in the policy, as its gradient."""
        for p, part in self._parts(direction):
            p.grad = part.clone()

    def gradient(self, weights: Tensor) -> Tensor:
        """J^T w, (D,), over packs; of rollouts without any weight nothing is computed."""
        batch = self.minibatch.copy()
        weights_T = torch.zeros_like(batch["tokens", "loss_weights"])
        weights_T[self._live] = weights.to(weights_T.dtype)
        batch["tokens", "loss_weights"] = weights_T
        idle = torch.ones(len(batch["rollouts"]), dtype=torch.bool, device=weights_T.device)
        idle[token_rows(batch)[weights_T != 0]] = False
        self.group.add_gradients(with_host(without(batch, idle)), Objective(_Scores()), None)
        return self.taken()

    def along(self, vector: Tensor) -> Tensor:
        """J v, (M,)."""
        if not bool(vector.any()):
            return torch.zeros_like(self.minibatch["tokens", "rollout_logprobs"][self._live])
        distance = self._distance(vector)
        with self._moved(vector, distance):
            ahead = self.logprobs()
        with self._moved(vector, -distance):
            behind = self.logprobs()
        return (ahead - behind) / (2 * distance)

    def bend(self, weights: Tensor, change: Tensor, vector: Tensor) -> Tensor:
        """J^T c + sum_t w_t nabla^2 l_t v, (D,)."""
        if not bool(vector.any()):
            return self.gradient(change)
        distance = self._distance(vector)
        with self._moved(vector, distance):
            ahead = self.gradient(weights + distance * change)
        with self._moved(vector, -distance):
            behind = self.gradient(weights - distance * change)
        return (ahead - behind) / (2 * distance)

    def _distance(self, vector: Tensor) -> float:
        """How many times v the weights are moved."""
        size = float(flat(self.parameters).detach().norm()) or 1.0
        return _REACH * torch.finfo(vector.dtype).eps ** (1 / 3) * size / float(vector.norm())

    @contextmanager
    def _moved(self, vector: Tensor, distance: float) -> Iterator[None]:
        """Weights that are ``distance`` times v away."""
        kept = [p.detach().clone() for p in self.parameters]
        try:
            with torch.no_grad():
                for p, part in self._parts(vector):
                    p.add_(part, alpha=distance)
            yield
        finally:
            with torch.no_grad():
                for p, before in zip(self.parameters, kept, strict=True):
                    p.copy_(before)

    def _parts(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of a vector (D,)."""
        parts = vector.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            yield p, part.reshape(p.shape).to(p.dtype)
