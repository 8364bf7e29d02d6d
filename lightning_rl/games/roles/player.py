"""PolicyPlayer: a policy as a player in a game, seen through its tokens' log probabilities."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algos.losses import Metrics, PolicyLoss
from lightning_rl.algos.objective import Objective
from lightning_rl.data.batch import token_rows, with_host
from lightning_rl.games.algos.game import flat
from lightning_rl.games.algos.scores import GamePlayer
from lightning_rl.games.roles.role_policy import RolePolicy
from lightning_rl.learn.skipped import without
from lightning_rl.run.token_metrics import TokenMetrics


@dataclass(frozen=True)
class _Scores(PolicyLoss):
    """log p: with loss weights w its gradient is J^T w."""

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        return logprobs, {}


class PolicyPlayer(GamePlayer):
    """A policy and the minibatch of rollouts that it learns from.

    Derivatives along a direction are central differences, because the attention and the head of a
    policy cannot be differentiated twice. The weights are moved both ways, and are then put back
    bit for bit. With eps the machine epsilon of the weights, the expected relative error of
    :meth:`along` and :meth:`bend` is ten times eps^(2/3), 2.4e-4 in float32. It is larger along a
    direction in which the log probabilities hardly change.

    Args:
        group: The policy.
        minibatch: Packed rollouts, whose loss tokens have the M log probabilities.
        objective: The policy's own objective.
    """

    def __init__(self, group: RolePolicy, minibatch: TensorDict, objective: Objective) -> None:
        self.group, self.minibatch, self.objective = group, minibatch, objective
        self._live = minibatch["tokens", "loss_mask"].nonzero().squeeze(1)
        optimizer = group.learner.backend.optimizer
        moving = [
            (p, g["lr"]) for g in optimizer.param_groups for p in g["params"] if p.requires_grad
        ]
        self.parameters: Sequence[nn.Parameter] = [p for p, _ in moving]
        self.rates = torch.cat([p.new_full((p.numel(),), lr) for p, lr in moving])

    def logprobs(self) -> Tensor:
        """Return the log probabilities l, (M,), at the current weights."""
        batch = self.group.loaded_policy.score(
            self.minibatch.copy(), "logprobs", self.group.learner.max_tokens_per_micro_batch
        )
        result: Tensor = batch["tokens", "logprobs"][self._live]
        return result

    def own(self) -> Tensor:
        """Return the gradient (D,) of the objective."""
        self.group.learner.accumulate(self.minibatch.copy(), self.objective, TokenMetrics())
        return self.taken()

    def taken(self) -> Tensor:
        """Take the accumulated gradient (D,) out of the policy."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.group.loaded_policy.zero_grad()
        return flat(found)

    def give(self, direction: Tensor) -> None:
        """Set a direction (D,) as the policy's gradient."""
        for p, part in self._parts(direction):
            p.grad = part.clone()

    def gradient(self, weights: Tensor) -> Tensor:
        """Return J^T w, (D,), summed over micro-batches; rollouts of zero weights are skipped."""
        batch = self.minibatch.copy()
        weights_T = torch.zeros_like(batch["tokens", "loss_weights"])
        weights_T[self._live] = weights.to(weights_T.dtype)
        batch["tokens", "loss_weights"] = weights_T
        idle = torch.ones(len(batch["rollouts"]), dtype=torch.bool, device=weights_T.device)
        idle[token_rows(batch)[weights_T != 0]] = False
        self.group.learner.add_gradients(with_host(without(batch, idle)), Objective(_Scores()))
        return self.taken()

    def along(self, vector: Tensor) -> Tensor:
        """Return J v, (M,), by a central difference."""
        if not bool(vector.any()):
            return torch.zeros_like(self.minibatch["tokens", "rollout_logprobs"][self._live])
        distance = self._distance(vector)
        with self._moved(vector, distance):
            ahead = self.logprobs()
        with self._moved(vector, -distance):
            behind = self.logprobs()
        return (ahead - behind) / (2 * distance)

    def bend(self, weights: Tensor, change: Tensor, vector: Tensor) -> Tensor:
        """Return J^T c + sum_t w_t nabla^2 l_t v, (D,), by a central difference."""
        if not bool(vector.any()):
            return self.gradient(change)
        distance = self._distance(vector)
        with self._moved(vector, distance):
            ahead = self.gradient(weights + distance * change)
        with self._moved(vector, -distance):
            behind = self.gradient(weights - distance * change)
        return (ahead - behind) / (2 * distance)

    @cached_property
    def _here(self) -> Tensor:
        """Log probabilities (M,) at the unmoved weights, which all differences are taken around."""
        return self.logprobs()

    def _distance(self, vector: Tensor) -> float:
        """Return the multiple of ``vector`` by which a central difference moves the weights.

        A difference over a distance d has an error of about eps / d from rounding and of d^2 / 6
        times the third derivative from curvature; d = (eps / third derivative)^(1/3) balances them.
        A log softmax bends when it changes by about one, so a token whose log probability has the
        slope s along v has a third derivative of about s^3. Over all tokens, d is the cube root of
        eps divided by the sixth-power mean of the slopes. Slopes along one weight and along the
        gradient differ a thousandfold, and the norm of the weights does not tell which it is. So
        they are measured, over a distance that is short enough for every direction: rounding leaves
        them right to a few percent.

        No distance is more than eps^(1/3) / 3 of the norm of the weights: along a direction in
        which log probabilities hardly change, it is the layers' activations that bend first.
        """
        eps = torch.finfo(vector.dtype).eps
        whole = (float(flat(self.parameters).detach().norm()) or 1.0) / float(vector.norm())
        trial = eps ** (2 / 3) * whole
        with self._moved(vector, trial):
            slopes = (self.logprobs() - self._here).double() / trial
        steepness = float((slopes**6).sum() / max(len(slopes), 1)) ** (1 / 6)
        return eps ** (1 / 3) / max(steepness, 3 / whole)

    @contextmanager
    def _moved(self, vector: Tensor, distance: float) -> Iterator[None]:
        """Move the weights by ``distance`` times ``vector`` inside the block."""
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
        """Yield each parameter with its part of a vector (D,)."""
        parts = vector.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            yield p, part.reshape(p.shape).to(p.dtype)
