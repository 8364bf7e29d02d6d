"""Learner: the whole update of a policy, from a packed batch of rollouts to optimizer steps."""

import math
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.correction import add_effective_share
from lightning_rl.algos.experts import ExpertLoad, RoutingReplay
from lightning_rl.algos.kl import KLPenalty, beyond_target, k3, ratios
from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.objective import Aggregation, Objective, loss_tokens
from lightning_rl.data.batch import empty_like, host_of, select, token_rows, with_host
from lightning_rl.data.splitting import split_minibatches, split_packs
from lightning_rl.errors import ConfigError
from lightning_rl.learn.ahead import NothingAhead
from lightning_rl.learn.gradients import clip_gradients, scale_gradients
from lightning_rl.learn.left_out import LeftOut, rows_beside, without, without_flags
from lightning_rl.models.memory import smaller_budget
from lightning_rl.models.parallel.sequence import turns
from lightning_rl.models.policy import Policy
from lightning_rl.models.reference import Reference
from lightning_rl.run.files.metrics import TokenMetrics
from lightning_rl.run.hooks import StageClock
from lightning_rl.run.processes.dist import all_sum, world_size
from lightning_rl.run.seeding import derived_generator


class Learner:
    """Scores batches and updates a policy on them, in named steps that can be overridden.

    It reads top to bottom as an iteration runs: ``compute_all`` adds logprobs, values and
    advantages to a batch, ``update`` makes the optimizer steps, ``end_iteration`` counts. It is
    plain torch. The abstract members are what differs between a Trainer, Fabric and a policy among
    several. Shapes: T tokens and R rollouts of a packed batch (:mod:`lightning_rl.data.batch`).
    """

    advantage: Advantage
    aggregation: Aggregation
    objective: Objective
    kl: KLPenalty | None
    kl_reward: KLPenalty | None
    reference: Reference | None
    routing_replay: RoutingReplay | None
    expert_load: ExpertLoad
    left_out: LeftOut
    ahead: NothingAhead
    """The part of the update that is computed while the batch is still being generated."""
    trust_engine_logprobs: bool
    ppo_epochs: int
    minibatches: int
    target_kl: float | None
    max_tokens_per_pack: int
    max_grad_norm: float | None
    seed: int
    iteration: int
    nonfinite_steps: int
    clock: StageClock

    # ---------------------------------------------------------------- asked of a subclass

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that computes."""

    @abstractmethod
    def step_precision(self) -> AbstractContextManager[object]:
        """Return the context of a training step, such as autocast."""

    @property
    @abstractmethod
    def loaded_policy(self) -> Policy:
        """The policy, once its weights are loaded."""

    @abstractmethod
    def own_optimizer(self) -> Any:
        """Return the optimizer of this policy's weights."""

    @abstractmethod
    def add_gradient(self, loss: Tensor, last: bool) -> None:
        """Add a scalar loss's gradient; average gradients over ranks if it is the ``last`` one."""

    @abstractmethod
    def take_step(self) -> None:
        """Step the optimizer, unless a gradient is not finite, and the learning-rate schedule."""

    def choose_packs(self, batch: TensorDict) -> None:
        """Set ``max_tokens_per_pack`` before the first batch; by default it is already set."""

    # ---------------------------------------------------------------- scores and advantages

    def compute_all(self, batch: TensorDict) -> TensorDict:
        """Add everything that an update needs: logprobs, values and advantages."""
        batch = self.loaded_policy.with_sight(batch)
        if self.routing_replay is not None:
            self.routing_replay.begin(batch)
        self.choose_packs(batch)
        self.ahead.attach(batch)
        if self.left_out.zero_advantage:  # advantages need rewards alone, and tell what to score
            batch = self.compute_advantages(batch)
        # With one update per batch the current policy is the old one: nothing to recompute.
        if self.ppo_epochs * self.minibatches > 1 or self.trust_engine_logprobs or self.kl_reward:
            batch = self.compute_old_logprobs(batch)
        if self.advantage.needs_values:
            batch = self.compute_values(batch)
        if self.reference is not None:
            batch = self.compute_ref_logprobs(batch)
        if not self.left_out.zero_advantage:
            batch = self.compute_advantages(batch)
        return batch

    def compute_old_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``old_logprobs`` (T,), the policy's before any update (with a critic also
        ``values``).
        """
        if self.advantage.needs_values or not self.trust_engine_logprobs:
            batch = self.score(batch, "old_logprobs")
        if self.trust_engine_logprobs:
            batch["tokens", "old_logprobs"] = batch["tokens", "rollout_logprobs"]
        return batch

    def compute_ref_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``ref_logprobs`` (T,) of the frozen reference; needs ``kl`` or ``kl_reward``."""
        if self.reference is None:
            raise ConfigError("compute_ref_logprobs needs a reference; set kl, e.g. to K3Penalty()")
        with self.reference.scoring(self.loaded_policy) as reference:
            return self._score(reference, batch, "ref_logprobs")

    def compute_values(self, batch: TensorDict) -> TensorDict:
        """Add ``values`` (T,) of the critic; free if ``compute_old_logprobs`` ran before."""
        if self.loaded_policy.value_head is None:
            raise ConfigError("compute_values needs a critic; set critic.head")
        return batch if "values" in batch["tokens"] else self.compute_old_logprobs(batch)

    def compute_advantages(self, batch: TensorDict) -> TensorDict:
        """Add ``advantages`` (T,), and ``returns`` (T,) with a critic.

        With ``kl_reward``, ``token_rewards`` (T,) = -coef x KL estimate are added first.
        """
        if self.kl_reward is not None:
            tokens = batch["tokens"]
            penalty = self.kl_reward(tokens["old_logprobs"], tokens["ref_logprobs"])
            coef = self.kl_reward.coef.at(self.iteration)
            tokens["token_rewards"] = -coef * penalty * tokens["loss_mask"]
        return self.advantage(batch)

    def score(self, batch: TensorDict, name: str) -> TensorDict:
        """Add the current policy's logprobs as ``name`` (T,), and with a critic ``values`` (T,).

        Rollouts known to be left out of the update get the engine's logprobs, and no values.
        """
        left_out = self.left_out.rows(batch) if "advantages" in batch["tokens"] else None
        return self._score(self.loaded_policy, batch, name, left_out)

    def _score(
        self, policy: Policy, batch: TensorDict, name: str, left_out: Tensor | None = None
    ) -> TensorDict:
        """Score the rollouts that are neither left out nor already scored ahead."""
        known = self.ahead.known(name)
        rows = rows_beside(left_out, known)
        records = self.routing_replay is not None and self.routing_replay.is_of(name)
        with self.clock("logprob"):
            batch = policy.score(batch, name, self.max_tokens_per_pack, rows, records)
            if left_out is not None:  # whoever compares the two finds no difference there
                tokens, idle_T = batch["tokens"], left_out[token_rows(batch)]
                tokens[name] = tokens["rollout_logprobs"].where(idle_T, tokens[name])
        if known is not None:
            self.ahead.fill(batch, name, "values", *(["routed_experts"] if records else []))
        return batch

    def trainer_logprobs(self, batch: TensorDict) -> Tensor:
        """Return the logprobs (T,) of the weights before the update, at least for the trained
        tokens.

        If the update does not need them, the first call takes one forward pass.
        """
        tokens = batch["tokens"]
        if "old_logprobs" in tokens and not self.trust_engine_logprobs:
            return tokens["old_logprobs"]
        if "trainer_logprobs" not in tokens:
            self.score(batch, "trainer_logprobs")
        return tokens["trainer_logprobs"]

    def kl_from_engine(self, batch: TensorDict, version: int) -> float:
        """Return the KL, in nats per token, from the weights of ``version`` to the current ones.

        It is the mean of k3, which is never negative, over the tokens that an engine wrote with
        that version, and takes one forward pass. After :meth:`note_engine`, it is over the tokens
        of other versions, too, each weighted by how much likelier the version makes it than its
        writer did. nan if there are no such tokens. Call it on all ranks; all get the same value.
        """
        tokens = batch["tokens"]
        noted = "engine_logprobs" in tokens
        written = tokens["loss_mask"] & (noted | (tokens["versions"] == version))
        if not all_sum(written.sum()):
            return math.nan
        self.loaded_policy.score(batch, "present_logprobs", self.max_tokens_per_pack)
        now, rollout = (
            tokens[n][written].double() for n in ("present_logprobs", "rollout_logprobs")
        )
        then = tokens["engine_logprobs"][written].double() if noted else rollout
        weights = ratios(then - rollout)
        total, count = all_sum(torch.stack([(weights * k3(then, now)).sum(), weights.sum()]))
        return float(total / count)

    def note_engine(self, batch: TensorDict) -> None:
        """Add ``engine_logprobs`` (T,), those of the present weights, which the engine has, too."""
        self.loaded_policy.score(batch, "engine_logprobs", self.max_tokens_per_pack)

    # ---------------------------------------------------------------- the update

    def update(self, batch: TensorDict, objective: Objective | None = None) -> dict[str, float]:
        """Make the optimizer steps: epochs x minibatches, each in packs; return the metrics.

        ``objective`` replaces the learner's own.
        """
        metrics, self.nonfinite_steps = TokenMetrics(), 0
        objective = objective or self.objective
        with self.clock("train"):
            for epoch in range(self.ppo_epochs):
                of_pass = TokenMetrics()
                parts = split_minibatches(batch, self.minibatches, self.dealing(epoch))
                done = None if epoch else self.ahead.claim(batch, objective, parts[0])
                for rows in parts:
                    own = None if done is None else done[rows]
                    self.accumulate(select(batch, rows), objective, of_pass, own)
                    self.step(of_pass)
                    done = None  # only the first minibatch has gradients that were taken ahead
                metrics.include(of_pass)
                if self.target_kl is not None and beyond_target(self.target_kl, of_pass.compute()):
                    break
        passes = {} if self.target_kl is None else {"policy/passes": epoch + 1.0}
        return self.summed_up(metrics) | passes

    def dealing(self, epoch: int) -> torch.Generator:
        """Return the random generator that deals this iteration's groups to minibatches."""
        return derived_generator(self.seed, self.iteration, epoch)

    def accumulate(
        self,
        minibatch: TensorDict,
        objective: Objective,
        metrics: TokenMetrics,
        done: Tensor | None = None,
    ) -> None:
        """Compute a minibatch's gradient, and add ``loss_weights`` (T,) to its tokens.

        ``done`` (R,) flags rollouts whose gradient, not yet normalised, has already been added.
        """
        minibatch = self.left_out.without_truncated(minibatch)
        factor = None
        if done is None:
            minibatch["tokens", "loss_weights"] = self.aggregation(minibatch)
        else:  # gradients that were taken ahead could not be divided yet
            weights = minibatch["tokens", "loss_weights"] = self.aggregation.weights(minibatch)
            factor = self.aggregation.factor(minibatch, weights)
            metrics.add({"policy/streamed_share": done})
        left_out = self.left_out.rows(minibatch)
        if left_out is not None:  # only now: they count where the loss is averaged
            metrics.add({"policy/skipped_share": left_out})
            done = None if done is None else without_flags(done, left_out)
            minibatch = without(minibatch, left_out)
        for pack_metrics in self.add_gradients(with_host(minibatch), objective, done):
            metrics.add(pack_metrics)
        if factor is not None:
            gradients = [p.grad for p in self.loaded_policy.parameters() if p.grad is not None]
            scale_gradients(gradients, factor)

    def add_gradients(
        self, minibatch: TensorDict, objective: Objective, done: Tensor | None = None
    ) -> list[Metrics]:
        """Compute the sum of all packs' gradients in ``.grad``; return the packs' metrics.

        The gradients of the rollouts ``done`` (R,) are already there. If a pack does not fit into
        memory, everything is computed again in packs of half the size.

        Raises:
            PackMemoryError: if that does not help, or other ranks cannot take part.
        """
        ranks, filling = self.loaded_policy.sequence, self.loaded_policy.filling
        budget = self.max_tokens_per_pack * (1 if ranks is None else ranks.shares)
        while True:
            if done is None:
                self.loaded_policy.zero_grad()  # also of what a pass left that ran out of memory
                rest, measured = minibatch, []
            else:
                rest, measured = without(minibatch, done), list(self.ahead.metrics)
            nothing_left = done is not None and bool(done.all())
            packs = [] if nothing_left else split_packs(rest, budget, filling=filling)
            # Sharded weights are gathered by all ranks together, for as many packs as any has; and
            # the last backward pass averages over ranks.
            due = list(turns(packs, ranks, together=True, least=int(world_size() > 1)))
            for place, rows in enumerate(due, 1):
                pack = empty_like(rest) if rows is None else select(rest, rows)
                try:
                    measured.append(self.backward_pack(pack, objective, last=place == len(due)))
                except RuntimeError as error:
                    budget, done = smaller_budget(pack, error, ranks, filling), None
                    break  # out of here first: the error holds on to what was computed so far
            else:
                return measured

    def backward_pack(self, pack: TensorDict, objective: Objective, last: bool) -> Metrics:
        """Add a pack's gradient; with the ``last`` pack, gradients are averaged over ranks."""
        scores = self.loaded_policy(pack)
        if scores.heard is not None:
            # Ranks that compute packs together have tokens of the others', too.
            counts = len(scores.live) > 0 or self.loaded_policy.sequence is not None
            self.expert_load.add(scores.heard, counts)
        tokens = loss_tokens(pack, scores)
        tokens["advantages"] = self.advantage.at_present(scores.logprobs.detach(), tokens)
        all_sampled = not bool(host_of(pack)["rollouts", "demonstration"].any())
        loss, metrics = objective(scores, tokens, self.iteration, all_sampled)
        coef = 0.0 if self.kl_reward is None else self.kl_reward.coef.at(self.iteration)
        if "token_rewards" in tokens and coef:  # at 0, rewards do not tell the KL
            metrics["reward/kl"] = -tokens["token_rewards"] / coef
        self.add_gradient((loss * tokens["loss_weights"]).sum(), last)
        return metrics

    def add_ahead(self, batch: TensorDict, rows: Tensor) -> tuple[Tensor, list[Metrics]]:
        """Add unnormalised gradients of the rows flagged (R,), before their minibatch is complete.

        Returns:
            Flags (R,) of the rows that have a gradient, and the packs' metrics.
        """
        batch = self.left_out.without_truncated(batch.copy())
        batch["tokens", "loss_weights"] = self.aggregation.weights(batch)
        left_out = self.left_out.rows(batch)
        rows = rows if left_out is None else rows & ~left_out.cpu()
        if not rows.any():
            return rows, []
        chosen = select(with_host(batch), rows.nonzero().squeeze(1))
        packs = split_packs(chosen, self.max_tokens_per_pack, filling=self.loaded_policy.filling)
        with self.clock("train"):
            return rows, [
                self.backward_pack(select(chosen, pack), self.objective, last=False)
                for pack in packs
            ]

    def step(self, metrics: TokenMetrics) -> None:
        """Clip the accumulated gradient, and make one optimizer step with it."""
        norm = clip_gradients(self.loaded_policy.parameters(), self.max_grad_norm or float("inf"))
        lr = self.own_optimizer().param_groups[0]["lr"]
        norm = norm.reshape(1)
        metrics.add({"policy/grad_norm": norm, "policy/lr": norm.new_full((1,), lr)})
        self.take_step()

    def summed_up(self, metrics: TokenMetrics) -> dict[str, float]:
        """Return the metrics of a finished update."""
        return (
            add_effective_share(metrics.compute())
            | self.expert_load.compute()
            | {"policy/nonfinite_skipped": float(self.nonfinite_steps)}
        )

    def end_iteration(self, metrics: dict[str, float]) -> None:
        """Count the iteration, and let coefficients and the reference adapt."""
        penalties = {"policy/kl_ref": self.kl, "reward/kl": self.kl_reward}
        coefficients = {name: kl.coef for name, kl in penalties.items() if kl is not None}
        if self.objective.entropy is not None:
            coefficients["policy/entropy"] = self.objective.entropy.schedule
        for measured, coef in coefficients.items():
            if measured in metrics:
                metrics[f"{measured}_coef"] = coef.at(self.iteration)
                coef.update(metrics[measured])
        self.iteration += 1
        self.ahead.clear()
        if self.reference is not None:
            self.reference.on_iteration_end(self.loaded_policy, self.iteration)
