"""Learner: the whole update of a policy, from a packed batch of rollouts to optimizer steps."""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import GRPO, Advantage
from lightning_rl.algos.correction import add_effective_share
from lightning_rl.algos.experts import ExpertLoad, RoutingReplay
from lightning_rl.algos.kl import KLPenalty, beyond_target
from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.objective import Aggregation, Objective, TokenMean, loss_tokens
from lightning_rl.data.batch import empty_like, host_of, select, token_rows, with_host
from lightning_rl.data.splitting import split_micro_batches, split_minibatches
from lightning_rl.errors import ConfigError
from lightning_rl.learn.auto_micro_batches import AutoMicroBatches
from lightning_rl.learn.backends import Backend
from lightning_rl.learn.gradients import clip_gradients
from lightning_rl.learn.overlap import NoOverlap, Overlap
from lightning_rl.learn.skipped import SkippedRollouts, rows_beside
from lightning_rl.learn.update_settings import UpdateSettings
from lightning_rl.models.memory import smaller_budget
from lightning_rl.models.parallel.sequence import turns
from lightning_rl.models.policy import Policy
from lightning_rl.models.reference import Reference
from lightning_rl.run.clock import StageClock
from lightning_rl.run.processes.dist import world_size
from lightning_rl.run.seeding import derived_generator, run_seed
from lightning_rl.run.token_metrics import TokenMetrics


class Learner:
    """Scores batches and updates a policy on them, in named steps that can be overridden.

    :meth:`step` is one iteration: ``compute_all`` adds logprobs, values and advantages to a batch,
    ``update`` makes the optimizer steps, ``end_iteration`` counts. It is plain torch; a ``backend``
    is what differs between Lightning's Trainer, Fabric and a script. Shapes: T tokens and R
    rollouts of a packed batch (:mod:`lightning_rl.data.batch`).

    Args:
        policy: the policy to update.
        backend: runs backward passes and optimizer steps, e.g. ``TorchBackend(optimizer)``.
        advantage: how rewards become credit.
        objective: the function to minimise.
        aggregation: how token losses are averaged.
        settings: how it goes through a batch.
        kl_reward: KL penalty against the reference, in the reward of each token; None: no penalty.
        reference: the policy that KL penalties compare with, already configured; None: no such
            penalty.
        routing_replay: whose expert choices all passes over a batch replay; None: nobody's.
        skipped: rollouts to exclude from the update; None: those that cannot change the policy.
        auto_micro_batches: measures how many tokens a micro-batch may have; None: as many as
            ``settings`` says.
        clock: measures the time of each stage; None: its own.

    Raises:
        ConfigError: for a KL penalty without a reference.
    """

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        advantage: Advantage = GRPO(),
        objective: Objective = Objective(),
        aggregation: Aggregation = TokenMean(),
        settings: UpdateSettings = UpdateSettings(),
        *,
        kl_reward: KLPenalty | None = None,
        reference: Reference | None = None,
        routing_replay: RoutingReplay | None = None,
        skipped: SkippedRollouts | None = None,
        auto_micro_batches: AutoMicroBatches | None = None,
        clock: StageClock | None = None,
    ) -> None:
        if reference is None and (objective.kl is not None or kl_reward is not None):
            raise ConfigError(
                "a KL penalty needs a reference; pass one, e.g. a FrozenReference() after its "
                "configure(policy)"
            )
        self.policy = policy
        self.backend = backend
        self.advantage = advantage
        self.objective = objective
        self.aggregation = aggregation
        self.settings = settings
        self.kl_reward = kl_reward
        self.reference = reference
        self.routing_replay = routing_replay
        self.skipped = skipped or SkippedRollouts.of(
            advantage, objective, kl_reward, settings.mask_truncated
        )
        self.auto_micro_batches = auto_micro_batches
        self.clock = clock or StageClock()
        self.overlap: Overlap = NoOverlap()
        """Computes parts of the update while the batch is still being generated."""
        self.expert_load = ExpertLoad()
        self.iteration = 0
        """Number of completed iterations, which is also the version of the weights."""
        self.nonfinite_steps = 0
        """Number of optimizer steps of this update that were skipped."""

    @property
    def max_tokens_per_micro_batch(self) -> int:
        """The tokens of a forward and backward pass: as measured, else as set."""
        measured = None if self.auto_micro_batches is None else self.auto_micro_batches.tokens
        return measured or self.settings.tokens_per_micro_batch

    def step(
        self, batch: TensorDict, decide: Callable[[TensorDict], Objective | None] | None = None
    ) -> dict[str, float]:
        """Run one iteration on a packed batch: score, update, count; return its metrics.

        ``decide`` is called with the scored batch, which it may change, and returns the objective
        of this update; None: make no update.
        """
        with self.backend.autocast():
            batch = self.compute_all(batch.to(self.backend.device))
            objective = self.objective if decide is None else decide(batch)
            metrics = {} if objective is None else self.update(batch, objective)
            self.end_iteration(metrics)
        return metrics

    # ---------------------------------------------------------------- scores and advantages

    def compute_all(self, batch: TensorDict) -> TensorDict:
        """Add everything that an update needs: logprobs, values and advantages."""
        batch = self.policy.with_sight(batch)
        if self.routing_replay is not None:
            self.routing_replay.begin(batch)
        self.choose_micro_batches(batch)
        self.overlap.attach(batch)
        if self.skipped.zero_advantage:  # advantages need rewards alone, and tell what to score
            batch = self.compute_advantages(batch)
        # With one update per batch the current policy is the old one: nothing to recompute.
        if self.settings.steps > 1 or self.settings.use_rollout_logprobs or self.kl_reward:
            batch = self.compute_old_logprobs(batch)
        if self.advantage.needs_values:
            batch = self.compute_values(batch)
        if self.reference is not None:
            batch = self.compute_ref_logprobs(batch)
        if not self.skipped.zero_advantage:
            batch = self.compute_advantages(batch)
        return batch

    def choose_micro_batches(self, batch: TensorDict) -> None:
        """Measure how many tokens a micro-batch can have, if that is requested and unknown."""
        if self.auto_micro_batches is not None and self.auto_micro_batches.tokens is None:
            optimizer, device = self.backend.optimizer, self.backend.device
            self.auto_micro_batches.measure(
                batch, self._try_micro_batch, optimizer, device, self.policy.filling
            )

    def _try_micro_batch(self, micro_batch: TensorDict) -> None:
        """Run a micro-batch forward and backward, and discard its gradient."""
        scores = self.policy(micro_batch)
        entropy = None if self.objective.entropy is None else scores.entropy
        columns = [x.sum() for x in (scores.logprobs, scores.values, entropy) if x is not None]
        self.backend.backward(torch.stack(columns).sum(), last=False)
        self.policy.zero_grad()

    def compute_old_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``old_logprobs`` (T,), the policy's before any update (with a critic also
        ``values``).
        """
        trusts = self.settings.use_rollout_logprobs
        if self.advantage.needs_values or not trusts:
            batch = self.score(batch, "old_logprobs")
        if trusts:
            batch["tokens", "old_logprobs"] = batch["tokens", "rollout_logprobs"]
        return batch

    def compute_ref_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``ref_logprobs`` (T,) of the frozen reference; needs ``kl`` or ``kl_reward``."""
        if self.reference is None:
            raise ConfigError("compute_ref_logprobs needs a reference; set kl, e.g. to K3Penalty()")
        with self.reference.scoring(self.policy) as reference:
            return self._score(reference, batch, "ref_logprobs")

    def compute_values(self, batch: TensorDict) -> TensorDict:
        """Add ``values`` (T,) of the critic; free if ``compute_old_logprobs`` ran before."""
        if self.policy.value_head is None:
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
        skipped = self.skipped.rows(batch) if "advantages" in batch["tokens"] else None
        return self._score(self.policy, batch, name, skipped)

    def _score(
        self, policy: Policy, batch: TensorDict, name: str, skipped: Tensor | None = None
    ) -> TensorDict:
        """Score the rollouts that are neither left out nor already scored."""
        known = self.overlap.known(name)
        rows = rows_beside(skipped, known)
        records = self.routing_replay is not None and self.routing_replay.is_of(name)
        with self.clock("logprob"):
            batch = policy.score(batch, name, self.max_tokens_per_micro_batch, rows, records)
            if skipped is not None:  # whoever compares the two finds no difference there
                tokens, idle_T = batch["tokens"], skipped[token_rows(batch)]
                tokens[name] = tokens["rollout_logprobs"].where(idle_T, tokens[name])
        if known is not None:
            self.overlap.fill(batch, name, "values", *(["routed_experts"] if records else []))
        return batch

    def trainer_logprobs(self, batch: TensorDict) -> Tensor:
        """Return the logprobs (T,) of the weights before the update, at least for the trained
        tokens.

        If the update does not need them, the first call takes one forward pass.
        """
        tokens = batch["tokens"]
        if "old_logprobs" in tokens and not self.settings.use_rollout_logprobs:
            return tokens["old_logprobs"]
        if "trainer_logprobs" not in tokens:
            self.score(batch, "trainer_logprobs")
        return tokens["trainer_logprobs"]

    # ---------------------------------------------------------------- the update

    def update(self, batch: TensorDict, objective: Objective | None = None) -> dict[str, float]:
        """Make the optimizer steps, epochs x minibatches, each in micro-batches; return metrics.

        ``objective`` replaces the learner's own.
        """
        metrics, self.nonfinite_steps = TokenMetrics(), 0
        objective, target_kl = objective or self.objective, self.settings.target_kl
        with self.clock("train"):
            for epoch in range(self.settings.ppo_epochs):
                of_pass = TokenMetrics()
                dealing = self.dealing(epoch)
                for rows in split_minibatches(batch, self.settings.minibatches, dealing):
                    if not self.overlap.complete(batch, rows, objective, of_pass):
                        self.accumulate(select(batch, rows), objective, of_pass)
                    self.optimizer_step(of_pass)
                metrics.include(of_pass)
                if target_kl is not None and beyond_target(target_kl, of_pass.compute()):
                    break
        passes = {} if target_kl is None else {"policy/passes": epoch + 1.0}
        return self.summed_up(metrics) | passes

    def dealing(self, epoch: int) -> torch.Generator:
        """Return the random generator that deals this iteration's groups to minibatches."""
        return derived_generator(run_seed(self.settings.seed), self.iteration, epoch)

    def accumulate(
        self, minibatch: TensorDict, objective: Objective, metrics: TokenMetrics
    ) -> None:
        """Compute a minibatch's gradient, and add ``loss_weights`` (T,) to its tokens."""
        minibatch = self.skipped.without_truncated(minibatch)
        minibatch["tokens", "loss_weights"] = self.aggregation(minibatch)
        minibatch = self.skipped.trained(minibatch, metrics)
        for micro_batch_metrics in self.add_gradients(with_host(minibatch), objective):
            metrics.add(micro_batch_metrics)

    def add_gradients(self, minibatch: TensorDict, objective: Objective) -> list[Metrics]:
        """Sum the gradients of all micro-batches in ``.grad``; return their metrics.

        If a micro-batch does not fit into memory, everything is computed again in micro-batches of
        half the size.

        Raises:
            MicroBatchMemoryError: if that does not help, or other ranks cannot take part.
        """
        budget: int | None = self.micro_batch_budget
        while budget is not None:
            self.policy.zero_grad()  # also of what a pass left that ran out of memory
            measured, budget = self.backward_micro_batches(minibatch, objective, budget)
        return measured

    @property
    def micro_batch_budget(self) -> int:
        """The tokens of a micro-batch that ranks compute together."""
        ranks = self.policy.sequence
        return self.max_tokens_per_micro_batch * (1 if ranks is None else ranks.shares)

    def backward_micro_batches(
        self, minibatch: TensorDict, objective: Objective, budget: int
    ) -> tuple[list[Metrics], int | None]:
        """Add the gradients of a minibatch, in micro-batches of up to ``budget`` tokens.

        Returns:
            The micro-batches' metrics, and None; or, if a micro-batch does not fit into memory, no
            metrics and a smaller budget.
        """
        ranks, filling, measured = self.policy.sequence, self.policy.filling, list[Metrics]()
        micro_batches = split_micro_batches(minibatch, budget, filling=filling)
        # Sharded weights are gathered by all ranks together, for as many micro-batches as any has;
        # and the last backward pass averages over ranks.
        due = list(turns(micro_batches, ranks, together=True, least=int(world_size() > 1)))
        for index, rows in enumerate(due, 1):
            micro_batch = empty_like(minibatch) if rows is None else select(minibatch, rows)
            try:
                measured.append(
                    self.backward_micro_batch(micro_batch, objective, last=index == len(due))
                )
            except RuntimeError as error:
                return [], smaller_budget(micro_batch, error, ranks, filling)
        return measured, None

    def backward_micro_batch(
        self, micro_batch: TensorDict, objective: Objective, last: bool
    ) -> Metrics:
        """Add a micro-batch's gradient; with the ``last``, gradients are averaged over ranks."""
        scores = self.policy(micro_batch)
        if scores.router_outputs is not None:
            # Ranks that compute micro-batches together have tokens of the others', too.
            counts = len(scores.live) > 0 or self.policy.sequence is not None
            self.expert_load.add(scores.router_outputs, counts)
        tokens = loss_tokens(micro_batch, scores)
        tokens["advantages"] = self.advantage.at_present(scores.logprobs.detach(), tokens)
        all_sampled = not bool(host_of(micro_batch)["rollouts", "demonstration"].any())
        loss, metrics = objective(scores, tokens, self.iteration, all_sampled)
        coef = 0.0 if self.kl_reward is None else self.kl_reward.coef.at(self.iteration)
        if "token_rewards" in tokens and coef:  # at 0, rewards do not tell the KL
            metrics["reward/kl"] = -tokens["token_rewards"] / coef
        self.backend.backward((loss * tokens["loss_weights"]).sum(), last)
        return metrics

    def optimizer_step(self, metrics: TokenMetrics) -> None:
        """Clip the accumulated gradient, and make one optimizer step with it."""
        most = self.settings.max_grad_norm or float("inf")
        norm = clip_gradients(self.policy.parameters(), most).reshape(1)
        lr = self.backend.optimizer.param_groups[0]["lr"]
        metrics.add({"policy/grad_norm": norm, "policy/lr": norm.new_full((1,), lr)})
        self.nonfinite_steps += not self.backend.step()

    def summed_up(self, metrics: TokenMetrics) -> dict[str, float]:
        """Return the metrics of a finished update."""
        return (
            add_effective_share(metrics.compute())
            | self.expert_load.compute()
            | {"policy/nonfinite_skipped": float(self.nonfinite_steps)}
        )

    def end_iteration(self, metrics: dict[str, float]) -> None:
        """Count the iteration, and let coefficients and the reference adapt."""
        penalties = {"policy/kl_ref": self.objective.kl, "reward/kl": self.kl_reward}
        coefficients = {name: kl.coef for name, kl in penalties.items() if kl is not None}
        if self.objective.entropy is not None:
            coefficients["policy/entropy"] = self.objective.entropy.schedule
        for measured, coef in coefficients.items():
            if measured in metrics:
                metrics[f"{measured}_coef"] = coef.at(self.iteration)
                coef.update(metrics[measured])
        self.iteration += 1
        self.overlap.clear()
        if self.reference is not None:
            self.reference.on_iteration_end(self.policy, self.iteration)
