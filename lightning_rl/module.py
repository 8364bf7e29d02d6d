"""PolicyModule: everything that is learning. One Lightning batch is one RL iteration."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.algos.advantages import GRPO, Advantage
from lightning_rl.algos.correction import Correction, add_effective_share
from lightning_rl.algos.experts import ExpertLoad, LoadBalance, RoutingReplay
from lightning_rl.algos.kl import (
    EntropyBonus,
    KLPenalty,
    beyond_target,
    check_target_kl,
    k3,
)
from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip, ValueLoss
from lightning_rl.algos.objective import (
    Aggregation,
    Objective,
    TokenMean,
    check_parts,
    loss_tokens,
)
from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import (
    empty_like,
    host_of,
    select,
    token_rows,
    with_host,
)
from lightning_rl.data.splitting import split_minibatches, split_packs
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.learn.auto_packs import DEFAULT, AutoPacks
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.learn.gradients import clip_gradients, scale_gradients
from lightning_rl.learn.left_out import LeftOut, without, without_flags
from lightning_rl.learn.own_loop import OwnLoop
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.precision import make_optimizer
from lightning_rl.learn.streamed import Stream
from lightning_rl.models.expert import require_experts
from lightning_rl.models.heads import ValueHead
from lightning_rl.models.lora import LoRA, as_lora
from lightning_rl.models.memory import smaller_budget
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import model_of
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.reference import FrozenReference, Reference
from lightning_rl.models.routing import require_routing
from lightning_rl.models.sequence import turns
from lightning_rl.models.sharding import read_by_rank_zero, shard
from lightning_rl.run.dist import all_sum, world_size
from lightning_rl.run.hooks import answers
from lightning_rl.run.metrics import TokenMetrics
from lightning_rl.run.resume import settle
from lightning_rl.run.seeding import derived_generator, run_seed
from lightning_rl.vision.training import Vision

LEAST_VALUE_LR = 1e-5
"""A critic's learning rate unless it is given one; verl's default."""


@configurable(model=model_of, lora=as_lora)
class PolicyModule(OwnLoop, RolloutModule):
    """Wraps a causal LM (policy head, optional value head) and improves it from rollouts.

    ``training_step`` runs the named steps below on one packed batch; each can be called by itself.
    Optimizer steps with a NaN or infinite gradient are left out (``policy/nonfinite_skipped``).
    Rollouts that cannot move the policy (``left_out``) are left out of them: the
    gradient is the same, and ``policy/*`` and ``rollout/logprob_gap_*`` are over the tokens that
    were trained on.

    Args:
        model: directory or hub name of the causal LM to train; in Python also a transformers model
            object, or a pair of it and its tokenizer, of which a copy is trained.
        advantage: how rewards become credit; ``GRPO()`` or ``GAE()`` (needs ``value_head``).
        loss: policy loss.
        aggregation: how token losses are averaged.
        value_head: critic, for ``GAE``: ``SharedValueHead()`` or ``SeparateValueHead()``.
        value_loss: the critic's loss.
        correction: importance weights for what the engine sampled otherwise than the trainer would
            have; None for none.
        kl: penalty against the reference, in the loss; None for none.
        kl_reward: the same in the reward of each token.
        reference: what ``kl`` and ``kl_reward`` compare with; None: a frozen copy of the start.
        entropy: bonus; None for none.
        balance: load-balancing loss of a mixture's routers; None for none.
        routing_replay: whose choice of experts the passes over a batch repeat: ``RolloutRouting()``
            the engine's, ``OldRouting()`` that of the pass for the old logprobs; None: the routers
            choose anew in each.
        lora: train adapters only; None: all weights. In Python also a ``peft.LoraConfig``.
        vision: what is trained of the part of an image-text model that sees; None: nothing.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.
        value_lr: learning rate of the critic's own parameters; None: the optimizer's, but at
            least 1e-5.
        value_warmup_iterations: train only the critic in the first so many iterations.
        trust_engine_logprobs: take the engine's logprobs for the old ones instead of recomputing
            them.
        mask_truncated: give rollouts that hit ``max_tokens`` no loss (DAPO's overlong filtering).
        ppo_epochs: passes over each collected batch.
        minibatches: optimizer steps per pass; whole groups are dealt to them at random.
        target_kl: no further pass over a batch once a pass's mean ``policy/kl_old`` is above it;
            None: all passes are made.
        max_tokens_per_pack: forward tokens in one forward/backward (bounds memory). ``auto``: as
            many as fit on the GPU, measured before the first update, and then kept in checkpoints
            and in the run's ``config.yaml``; on a CPU 16,384.
        max_grad_norm: clip the gradient's global norm; None: leave it.
        gradient_checkpointing: recompute activations in backward, all of them or as
            ``Recompute`` says.
        compile: let ``torch.compile`` make the layers and the output faster; the first iteration
            pays for it. None: on CUDA, where that is proven.
        random_init: start from random weights instead of those in ``model``.
        cast_lm_head_to_fp32: compute logits in float32 though the Trainer's precision has 16 bits.
        trust_remote_code: run code that comes with the model.
        model_kwargs: further arguments of ``from_pretrained``, such as ``revision``.
        seed: of the order in which groups are dealt to minibatches; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range, or an advantage that needs a missing value head.
    """

    def __init__(
        self,
        model: str,
        advantage: Advantage = GRPO(),
        loss: PolicyLoss = PPOClip(),
        aggregation: Aggregation = TokenMean(),
        value_head: ValueHead | None = None,
        value_loss: ValueLoss = ValueLoss(),
        correction: Correction | None = None,
        kl: KLPenalty | None = None,
        kl_reward: KLPenalty | None = None,
        reference: Reference | None = None,
        entropy: EntropyBonus | None = None,
        balance: LoadBalance | None = None,
        routing_replay: RoutingReplay | None = None,
        lora: LoRA | None = None,
        vision: Vision | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(
            p, lr=1e-6, weight_decay=0.0, fused=True
        ),
        lr_scheduler: LRSchedulerCallable | None = None,
        value_lr: float | None = None,
        value_warmup_iterations: int = 0,
        trust_engine_logprobs: bool = False,
        mask_truncated: bool = False,
        ppo_epochs: int = 1,
        minibatches: int = 1,
        target_kl: float | None = None,
        max_tokens_per_pack: int | Literal["auto"] = DEFAULT,
        max_grad_norm: float | None = 1.0,
        gradient_checkpointing: bool | Recompute = False,
        compile: bool | None = None,
        random_init: bool = False,
        cast_lm_head_to_fp32: bool = False,
        trust_remote_code: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            gradient_checkpointing=gradient_checkpointing,
            trust_remote_code=trust_remote_code,
            model_kwargs=model_kwargs,
            random_init=random_init,
            lora=lora,
            vision=vision,
        )
        require_at_least(
            1,
            ppo_epochs=ppo_epochs,
            minibatches=minibatches,
            max_tokens_per_pack=DEFAULT if max_tokens_per_pack == "auto" else max_tokens_per_pack,
        )
        require_at_least(0, value_lr=value_lr)
        require_finite(value_lr=value_lr, max_grad_norm=max_grad_norm)
        check_target_kl(target_kl, ppo_epochs=ppo_epochs)
        objective = Objective(
            loss,
            correction,
            kl,
            entropy,
            value_loss if advantage.needs_values else None,
            value_warmup_iterations,
            balance,
        )
        check_parts(
            advantage,
            objective,
            has_critic=value_head is not None,
            kl_reward=kl_reward,
            reference=reference,
            trust_engine_logprobs=trust_engine_logprobs,
            max_grad_norm=max_grad_norm,
        )
        save_primitive_hparams(self)
        self.automatic_optimization = False
        self.advantage = advantage
        self.aggregation = aggregation
        self.objective = objective
        self.left_out = LeftOut(
            truncated=mask_truncated,
            zero_advantage=loss.zero_at_zero_advantage
            and (kl, kl_reward, entropy, balance) == (None, None, None, None)
            and not advantage.needs_values,
        )
        self.routing_replay = routing_replay
        self.expert_load = ExpertLoad()
        self.kl = kl
        self.kl_reward = kl_reward
        self.trust_engine_logprobs = trust_engine_logprobs
        self.mask_truncated = mask_truncated
        self.value_lr = value_lr
        self.ppo_epochs = ppo_epochs
        self.minibatches = minibatches
        self.target_kl = target_kl
        self.packs = AutoPacks() if max_tokens_per_pack == "auto" else None
        self.max_tokens_per_pack = DEFAULT if max_tokens_per_pack == "auto" else max_tokens_per_pack
        self.max_grad_norm = max_grad_norm
        self.compile_layers = compile
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self.trust_remote_code = trust_remote_code
        self.seed = run_seed(seed)
        self.reference: Reference | None = None
        self.stream: Stream | None = None
        """What works on groups while an engine writes the others, in a run that streams."""
        # Tuples hide modules from nn.Module until they are configured.
        self._value_head, self._reference = (value_head,), (reference,)

    # ---------------------------------------------------------------- set-up

    @property
    def described_as(self) -> str:
        """Directory or hub name of the model."""
        return str(self.model)

    @property
    def policies(self) -> Mapping[str, "PolicyModule"]:
        return {"": self}

    @property
    def roles(self) -> Mapping[str, str]:
        return {}

    def configure_model(self) -> None:
        """Load the model (once); Lightning calls this under the strategy's own context."""
        if self.policy is not None:
            return
        mesh = self.device_mesh  # of a ModelParallelStrategy
        with nullcontext() if mesh is None else read_by_rank_zero():
            self.policy = Policy(
                self.model,
                self._value_head[0],
                self.random_init,
                self.gradient_checkpointing,
                self.lora,
                self.compile_layers,
                self.cast_lm_head_to_fp32,
                self.loading,
                self.own_lm(),
                self.vision,
            )
            self._use_routing(self.policy)
            if self.kl is not None or self.kl_reward is not None:
                self.reference = self._reference[0] or FrozenReference()
                self.reference.configure(self.policy)
        if mesh is not None:
            precision = str(self.trainer.precision)
            strategy: Any = self.trainer.strategy
            offload = getattr(strategy, "cpu_offload", False)
            sequence = getattr(strategy, "sequence", 1)
            experts = getattr(strategy, "expert_mesh", None)
            if experts is not None:
                require_experts(self.policy.lm, strategy.expert)
            for policy in [part for part in self.modules() if isinstance(part, Policy)]:
                shard(policy, mesh, precision, offload, experts)
                policy.agree_on_passes()
                if sequence > 1 or policy.tensor is not None:
                    if self.packs is not None:
                        raise ConfigError(
                            "model.max_tokens_per_pack=auto is not measured where several "
                            f"processes compute a pack (sequence={sequence}, or tensor > 1); set "
                            f"a number, such as {DEFAULT}"
                        )
                    policy.share_packs(sequence)

    def _use_routing(self, policy: Policy) -> None:
        """Tell the policy what is asked of its routers.

        Raises:
            ConfigError: if it has none.
        """
        balance = self.objective.balance
        if balance is not None or self.routing_replay is not None:
            policy.routing = policy.routing or require_routing(policy.lm)
            policy.replays = self.routing_replay is not None
        if balance is not None and policy.routing is not None:
            policy.routing.balanced = True
            found = balance.of_model(policy.lm.config.get_text_config(), str(self.model))
            self.objective = replace(self.objective, balance=found)

    def own_lm(self) -> PreTrainedModel | None:
        """The causal LM where it is loaded already; None: ``model`` is still to be read."""
        return None

    def configure_optimizers(self) -> Any:
        groups = self.loaded_policy.parameter_groups(self.value_lr)
        optimizer = make_optimizer(self, self.optimizer, groups)
        if self.loaded_policy.value_head is not None and self.value_lr is None:
            # A critic starts from nothing: the policy's small steps would not get it anywhere.
            critic = optimizer.param_groups[-1]
            critic["lr"] = max(critic["lr"], LEAST_VALUE_LR) if critic["lr"] else 0.0
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def own_optimizer(self) -> Any:
        """What steps its weights, as the Trainer has it."""
        return self.optimizers()  # one, so not a list

    # ---------------------------------------------------------------- the named steps

    def score(self, batch: TensorDict, name: str) -> TensorDict:
        """Add the present policy's logprobs as ``name`` (T,), and with a critic ``values`` (T,).

        Rollouts that are known to be left out of the update get the engine's, and no values.
        """
        left_out = self.left_out.rows(batch) if "advantages" in batch["tokens"] else None
        return self._score(self.loaded_policy, batch, name, left_out)

    def _score(
        self, policy: Policy, batch: TensorDict, name: str, left_out: Tensor | None = None
    ) -> TensorDict:
        """Have the rollouts scored that are not left out, and were not when they were streamed."""
        known = None if self.stream is None else self.stream.knows(name)
        skipped = [flags.cpu() for flags in (left_out, known) if flags is not None]
        rows = (~torch.stack(skipped).any(0)).nonzero().squeeze(1) if skipped else None
        records = self.routing_replay is not None and self.routing_replay.is_of(name)
        with self.clock("logprob"):
            batch = policy.score(batch, name, self.max_tokens_per_pack, rows, records)
            if left_out is not None:  # whoever compares the two finds no difference there
                tokens, idle_T = batch["tokens"], left_out[token_rows(batch)]
                tokens[name] = tokens["rollout_logprobs"].where(idle_T, tokens[name])
        if self.stream is not None and known is not None:
            self.stream.fill(batch, name, "values", *(["routed_experts"] if records else []))
        return batch

    def compute_old_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``old_logprobs`` (T,), the policy's before any update (with a critic, ``values``)."""
        if self.advantage.needs_values or not self.trust_engine_logprobs:
            batch = self.score(batch, "old_logprobs")
        if self.trust_engine_logprobs:
            batch["tokens", "old_logprobs"] = batch["tokens", "rollout_logprobs"]
        return batch

    def trainer_logprobs(self, batch: TensorDict) -> Tensor:
        """Logprobs (T,) of the weights before the update, at least of the tokens it trains on.

        Where the update does without them, it is one forward pass, whoever asks.
        """
        tokens = batch["tokens"]
        if "old_logprobs" in tokens and not self.trust_engine_logprobs:
            return tokens["old_logprobs"]
        if "trainer_logprobs" not in tokens:
            self.score(batch, "trainer_logprobs")
        return tokens["trainer_logprobs"]

    def kl_from_engine(self, batch: TensorDict, version: int) -> float:
        """KL, in nats per token, from the weights of a version to the present ones.

        On what an engine wrote with that version, for which this takes one forward pass; nan if it
        wrote nothing in this batch. The same on all ranks, which call it together. The estimate is
        k3, which is never negative.
        """
        self.loaded_policy.score(batch, "present_logprobs", self.max_tokens_per_pack)
        tokens = batch["tokens"]
        written = tokens["loss_mask"] & (tokens["versions"] == version)
        kl = k3(tokens["rollout_logprobs"][written], tokens["present_logprobs"][written])
        total, count = all_sum(torch.stack([kl.double().sum(), written.sum().double()])).tolist()
        return total / count if count else math.nan

    def compute_ref_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``ref_logprobs`` (T,) of the frozen reference; needs ``kl``."""
        if self.reference is None:
            raise ConfigError("compute_ref_logprobs needs a reference: set kl, e.g. K3Penalty()")
        with self.reference.scoring(self.loaded_policy) as reference:
            return self._score(reference, batch, "ref_logprobs")

    def compute_values(self, batch: TensorDict) -> TensorDict:
        """Add ``values`` (T,) of the critic; free if ``compute_old_logprobs`` ran before."""
        if self.loaded_policy.value_head is None:
            raise ConfigError("compute_values needs a critic: set value_head")
        return batch if "values" in batch["tokens"] else self.compute_old_logprobs(batch)

    def compute_advantages(self, batch: TensorDict) -> TensorDict:
        """Add ``advantages`` (T,), and ``returns`` (T,) with a critic.

        With ``kl_reward``, ``token_rewards`` (T,) = -coef x KL estimate come first.
        """
        if self.kl_reward is not None:
            tokens = batch["tokens"]
            penalty = self.kl_reward(tokens["old_logprobs"], tokens["ref_logprobs"])
            coef = self.kl_reward.coef.at(self.iteration)
            tokens["token_rewards"] = -coef * penalty * tokens["loss_mask"]
        return self.advantage(batch)

    def compute_all(self, batch: TensorDict) -> TensorDict:
        """Add all that an update needs: advantages, and the logprobs and values that count."""
        batch = self.loaded_policy.with_sight(batch)
        if self.routing_replay is not None:
            self.routing_replay.begin(batch)
        if self.packs is not None and self.packs.tokens is None:
            self.fit_packs(batch, self.packs)
        if self.stream is not None:
            self.stream.attach(batch)
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

    def fit_packs(self, batch: TensorDict, packs: AutoPacks) -> None:
        """Choose how many tokens a pack has, before anything is computed in packs."""
        filling = self.loaded_policy.filling
        packs.measure(
            batch, self._trial, self.own_optimizer(), self.optimizer, self.device, filling
        )
        self._use_packs()

    def _trial(self, pack: TensorDict) -> None:
        """A pass of a pack whose gradient nobody takes."""
        policy = self.loaded_policy
        scores = policy(pack)
        entropy = None if self.objective.entropy is None else scores.entropy
        columns = [x.sum() for x in (scores.logprobs, scores.values, entropy) if x is not None]
        strategy: Any = self.trainer.strategy
        alone = isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if alone else nullcontext():
            self.manual_backward(torch.stack(columns).sum())
        policy.zero_grad()

    def _use_packs(self) -> None:
        """Go by what was measured, and have it where the run is done again from."""
        if self.packs is None or self.packs.tokens is None:
            return
        self.max_tokens_per_pack = self.packs.tokens
        if self._trainer is not None and self.trainer.state.fn == "fit":
            settle(self.trainer, self.name, "max_tokens_per_pack", self.packs.tokens)

    def load_parts(self, states: Mapping[str, Any]) -> None:
        super().load_parts(states)
        self._use_packs()

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """One RL iteration on a packed batch: compute, let callbacks decide, update."""
        self.require_packed(batch)
        batch = self.compute_all(batch)
        objective = self.decided(batch)
        metrics = {} if objective is None else self.update(batch, objective)
        self.end_iteration(metrics)
        self.record(metrics)

    def decided(self, batch: TensorDict) -> Objective | None:
        """Apply what callbacks decide, each before the next is asked; None: no update."""
        objective, skip = self.objective, False
        for decision in answers(self.trainer, "on_update_start", batch, module=self):
            skip = skip or decision.skip or decision.stop is not None
            self.stopping = self.stopping or decision.stop
            if decision.mask is not None:
                batch["tokens", "loss_mask"] = batch["tokens", "loss_mask"] & ~decision.mask
                left = all_sum(self.left_out.trained_tokens(batch).sum())
                skip = skip or not left
            if decision.correction is not None:
                objective = replace(objective, correction=decision.correction)
                if self.trust_engine_logprobs:  # else every weight would be 1
                    batch["tokens", "old_logprobs"] = self.trainer_logprobs(batch)
        return None if skip else objective

    def update(self, batch: TensorDict, objective: Objective | None = None) -> dict[str, float]:
        """PPO epochs x minibatches x packs of optimisation; returns the iteration's metrics.

        ``objective``: in place of the module's own.
        """
        metrics, self.nonfinite_steps = TokenMetrics(), 0
        objective = objective or self.objective
        with self.clock("train"):
            for epoch in range(self.ppo_epochs):
                of_pass = TokenMetrics()
                parts = split_minibatches(batch, self.minibatches, self.dealing(epoch))
                done = None
                if self.stream is not None and epoch == 0:
                    done = self.stream.claim(batch, objective, parts[0])
                for rows in parts:
                    own = None if done is None else done[rows]
                    self.accumulate(select(batch, rows), objective, of_pass, own)
                    self.step(of_pass)
                    done = None  # they are all of the first minibatch
                metrics.include(of_pass)
                if self.target_kl is not None and beyond_target(self.target_kl, of_pass.compute()):
                    break
        passes = {} if self.target_kl is None else {"policy/passes": epoch + 1.0}
        return self.summed_up(metrics) | passes

    def summed_up(self, metrics: TokenMetrics) -> dict[str, float]:
        """The metrics of an update that is over."""
        return (
            add_effective_share(metrics.compute())
            | self.expert_load.compute()
            | {"policy/nonfinite_skipped": float(self.nonfinite_steps)}
        )

    def accumulate(
        self,
        minibatch: TensorDict,
        objective: Objective,
        metrics: TokenMetrics,
        done: Tensor | None = None,
    ) -> None:
        """Leave the gradient of a minibatch in the policy, and ``loss_weights`` (T,) in its tokens.

        ``done`` (R,): rollouts whose gradient is in the policy already, as a stream leaves it.
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

    def step(self, metrics: TokenMetrics) -> None:
        """One optimizer step, of the gradient that is in the policy, clipped."""
        optimizer = self.own_optimizer()
        parameters = self.loaded_policy.parameters()
        norm = clip_gradients(parameters, self.max_grad_norm or float("inf")).reshape(1)
        lr = norm.new_full((1,), optimizer.param_groups[0]["lr"])
        metrics.add({"policy/grad_norm": norm, "policy/lr": lr})
        if self._trainer is None:  # with Fabric; a Trainer calls this hook within the step
            self.on_before_optimizer_step(optimizer)
        optimizer.step()
        if self.lr_scheduler is not None:
            scheduler: Any = self.lr_schedulers()
            scheduler.step()

    def add_gradients(
        self, minibatch: TensorDict, objective: Objective, done: Tensor | None
    ) -> list[Metrics]:
        """Leave the sum of all packs' gradients in the policy; returns the packs' metrics.

        The rollouts ``done`` (R,) have theirs there already. When a pack does not fit into memory,
        all is done again with packs of half its size.

        Raises:
            PackMemoryError: if that does not help, or other ranks cannot take part.
        """
        ranks, filling = self.loaded_policy.sequence, self.loaded_policy.filling
        budget = self.max_tokens_per_pack * (1 if ranks is None else ranks.shares)
        while True:
            if done is None or self.stream is None:
                self.loaded_policy.zero_grad()  # also of what a pass left that ran out of memory
                measured, rest, packs = (
                    [],
                    minibatch,
                    split_packs(minibatch, budget, filling=filling),
                )
            else:
                measured, rest = list(self.stream.metrics), without(minibatch, done)
                packs = [] if done.all() else split_packs(rest, budget, filling=filling)
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
        """Add a pack's gradient; under DDP it is averaged with the last pack's."""
        scores = self.loaded_policy(pack)
        if scores.heard is not None:
            self.expert_load.add(scores.heard, counts=len(scores.live) > 0)
        tokens = loss_tokens(pack, scores)
        all_sampled = not bool(host_of(pack)["rollouts", "expert"].any())
        loss, metrics = objective(scores, tokens, self.iteration, all_sampled)
        coef = 0.0 if self.kl_reward is None else self.kl_reward.coef.at(self.iteration)
        if "token_rewards" in tokens and coef:  # at 0, rewards do not tell the KL
            metrics["reward/kl"] = -tokens["token_rewards"] / coef
        strategy: Any = self.trainer.strategy
        blocks = isinstance(strategy, DDPStrategy) and not last
        with strategy.block_backward_sync() if blocks else nullcontext():
            self.manual_backward((loss * tokens["loss_weights"]).sum())
        return metrics

    def add_ahead(self, batch: TensorDict, rows: Tensor) -> tuple[Tensor, list[Metrics]]:
        """Add gradients of these rows, flags (R,), undivided, before their minibatch is complete.

        Returns:
            Flags of those that have one, and the packs' metrics.
        """
        batch = self.left_out.without_truncated(batch.copy())
        batch["tokens", "loss_weights"] = self.aggregation.weights(batch)
        left_out = self.left_out.rows(batch)
        rows = rows if left_out is None else rows & ~left_out.cpu()
        if not rows.any():
            return rows, []
        chosen = select(with_host(batch), rows.nonzero().squeeze(1))
        filling = self.loaded_policy.filling
        packs = split_packs(chosen, self.max_tokens_per_pack, filling=filling)
        with self.clock("train"):
            return rows, [
                self.backward_pack(select(chosen, pack), self.objective, last=False)
                for pack in packs
            ]

    def dealing(self, epoch: int) -> torch.Generator:
        """What deals the groups of this iteration to minibatches."""
        return derived_generator(self.seed, self.iteration, epoch)

    def end_iteration(self, metrics: dict[str, float]) -> None:
        """Count the iteration, and let what adapts over iterations do so."""
        for penalty, measured in ((self.kl, "policy/kl_ref"), (self.kl_reward, "reward/kl")):
            if penalty is not None and measured in metrics:
                metrics[f"{measured}_coef"] = penalty.coef.at(self.iteration)
                penalty.coef.update(metrics[measured])
        self.iteration += 1
        if self.stream is not None:
            self.stream.clear()
        if self.reference is not None:
            self.reference.on_iteration_end(self.loaded_policy, self.iteration)

    def stateful_parts(self) -> dict[str, Any]:
        parts = {
            "advantage": self.advantage,
            "kl": self.kl,
            "kl_reward": self.kl_reward,
            "packs": self.packs,
        }
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


def policies_of(module: RolloutModule) -> Mapping[str, PolicyModule]:
    """A module's policies, with all that they learn by."""
    return cast(Mapping[str, PolicyModule], module.policies)
