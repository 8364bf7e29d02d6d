"""PolicyModule: the learning half of a run. One Lightning batch is one RL iteration."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lightning_rl.algos.advantages import GRPO, Advantage
from lightning_rl.algos.correction import Correction
from lightning_rl.algos.experts import LoadBalance, RoutingReplay
from lightning_rl.algos.kl import EntropyBonus, KLPenalty
from lightning_rl.algos.losses import PolicyLoss, PPOClip
from lightning_rl.algos.objective import Aggregation, Objective, TokenMean, check_parts
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.learn.auto_micro_batches import DEFAULT, AutoMicroBatches
from lightning_rl.learn.backends import Backend
from lightning_rl.learn.base import LearningModule, save_primitive_hparams
from lightning_rl.learn.critic import Critic, as_critic
from lightning_rl.learn.learner import Learner
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.precision import make_optimizer
from lightning_rl.learn.schedulers import make_scheduler
from lightning_rl.learn.skipped import SkippedRollouts
from lightning_rl.learn.trainer_backend import TrainerBackend
from lightning_rl.learn.update_settings import UpdateSettings
from lightning_rl.models.lora import LoRA, as_lora
from lightning_rl.models.parallel.expert import require_experts
from lightning_rl.models.parallel.sharding import read_by_rank_zero, shard
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading, model_of
from lightning_rl.models.reference import FrozenReference, Reference
from lightning_rl.models.routing import require_routing
from lightning_rl.run.files.resume import settle
from lightning_rl.run.hooks import answers
from lightning_rl.run.processes.dist import all_sum
from lightning_rl.run.seeding import run_seed
from lightning_rl.vision.training import Vision


@configurable(model=model_of, lora=as_lora, critic=as_critic)
class PolicyModule(RolloutModule, LearningModule):
    """Wraps a causal LM (policy head, optional value head) and improves it from rollouts.

    ``training_step`` runs one :meth:`~lightning_rl.learn.learner.Learner.step` of its ``learner``,
    whose named steps can be called one by one, or overridden in a class of your own. Optimizer
    steps with a NaN or infinite gradient are skipped (``policy/nonfinite_skipped``). Rollouts that
    cannot change the policy (``skipped``) are excluded from the update: the gradient is the same,
    and ``policy/*`` and ``rollout/logprob_gap_*`` are averaged over the trained tokens.

    Args:
        model: directory or hub name of the causal LM to train; in Python also a transformers model
            object, or a pair of it and its tokenizer, of which a copy is trained.
        advantage: how rewards become credit; ``GRPO()`` or ``GAE()`` (needs a ``critic``).
        loss: policy loss.
        aggregation: how token losses are averaged.
        critic: a value head and how it learns, for ``GAE``; None: no critic. In Python also the
            head alone, such as ``SharedValueHead()``.
        correction: importance weights for the difference between the engine's and the trainer's
            distribution; None: no correction.
        kl: KL penalty against the reference, in the loss; None: no penalty.
        kl_reward: KL penalty against the reference, in the reward of each token; None: no penalty.
        reference: the policy that ``kl`` and ``kl_reward`` compare with; None: a frozen copy of the
            initial model.
        entropy: entropy bonus; None: no bonus.
        balance: load-balancing loss of a mixture-of-experts router; None: no such loss.
        routing_replay: whose expert choices all passes over a batch replay: ``RolloutRouting()``
            the engine's, ``OldRouting()`` those of the pass for the old logprobs; None: the routers
            choose again in each pass.
        lora: train only adapters; None: train all weights. In Python also a ``peft.LoraConfig``.
        vision: which parts of an image-text model's vision are trained; None: none.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.
        update: how a batch is gone through: passes, minibatches, micro-batches and clipping.
        loading: how the model is loaded: its own code, ``gradient_checkpointing`` and others.
        compile: compile the layers and the output with ``torch.compile``, which makes the first
            iteration slower. None: compile on CUDA, where it is tested.
        learner: class of the learner: :class:`~lightning_rl.learn.learner.Learner`, or a subclass.

    Raises:
        ConfigError: for values out of range, or an advantage that needs a missing value head.
    """

    def __init__(
        self,
        model: str,
        advantage: Advantage = GRPO(),
        loss: PolicyLoss = PPOClip(),
        aggregation: Aggregation = TokenMean(),
        critic: Critic | None = None,
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
        update: UpdateSettings = UpdateSettings(),
        loading: Loading = Loading(),
        compile: bool | None = None,
        learner: type[Learner] = Learner,
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loading=loading,
            lora=lora,
            vision=vision,
        )
        objective = Objective(
            loss,
            correction,
            kl,
            entropy,
            critic.loss if critic is not None and advantage.needs_values else None,
            0 if critic is None else critic.warmup_iterations,
            balance,
        )
        check_parts(
            advantage,
            objective,
            has_critic=critic is not None,
            kl_reward=kl_reward,
            reference=reference,
            use_rollout_logprobs=update.use_rollout_logprobs,
        )
        save_primitive_hparams(self)
        self.automatic_optimization = False
        self.advantage = advantage
        self.aggregation = aggregation
        self.objective = objective
        self.update = replace(update, seed=run_seed(update.seed))  # whatever is seeded later
        self.skipped = SkippedRollouts.of(advantage, objective, kl_reward, update.mask_truncated)
        measures = update.max_tokens_per_micro_batch == "auto"
        self.auto_micro_batches = (
            AutoMicroBatches(optimizer, self._note_micro_batches) if measures else None
        )
        self.routing_replay = routing_replay
        self.kl_reward = kl_reward
        self.critic = critic
        self.compile_layers = compile
        self.reference: Reference | None = None
        self._learner = learner
        # A tuple hides modules from nn.Module until they are configured.
        self._reference = (reference,)

    # ---------------------------------------------------------------- set-up

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
                None if self.critic is None else self.critic.head,
                self.lora,
                self.compile_layers,
                self.loading,
                self.own_lm(),
                self.vision,
            )
            self._use_routing(self.policy)
            self.policy.follows_teacher = self.objective.loss.needs_teacher
            if self.objective.kl is not None or self.kl_reward is not None:
                self.reference = self._reference[0] or FrozenReference()
                self.reference.configure(self.policy)
        if mesh is not None:
            self._shard(mesh)

    def _shard(self, mesh: DeviceMesh) -> None:
        """Shard all of the module's policies over the ranks of a ``ModelParallelStrategy``."""
        precision = str(self.trainer.precision)
        strategy: Any = self.trainer.strategy
        offload = getattr(strategy, "cpu_offload", False)
        sequence = getattr(strategy, "sequence", 1)
        experts = getattr(strategy, "expert_mesh", None)
        if experts is not None:
            require_experts(self.loaded_policy.lm, strategy.expert)
        for policy in [part for part in self.modules() if isinstance(part, Policy)]:
            shard(policy, mesh, precision, offload, experts)
            policy.agree_on_passes()
            if sequence > 1 or policy.tensor is not None:
                if policy.follows_teacher:
                    raise ConfigError(
                        f"loss={type(self.objective.loss).__name__} scores a teacher's likeliest "
                        "tokens, which processes that compute a micro-batch together "
                        f"(sequence={sequence}, or tensor > 1) do not exchange; use advantage: "
                        "Distillation"
                    )
                if self.auto_micro_batches is not None:
                    raise ConfigError(
                        "model.update.max_tokens_per_micro_batch=auto cannot be measured if "
                        f"several processes compute a micro-batch (sequence={sequence}, or tensor "
                        f"> 1); set a number, such as {DEFAULT}"
                    )
                policy.share_micro_batches(sequence)

    def _use_routing(self, policy: Policy) -> None:
        """Configure the policy's routers for balancing and replay.

        Raises:
            ConfigError: if the model has no routers.
        """
        balance = self.objective.balance
        if balance is not None or self.routing_replay is not None:
            policy.routing = policy.routing or require_routing(policy.lm)
            policy.replays = self.routing_replay is not None
        if balance is not None and policy.routing is not None:
            policy.routing.balanced = True
            found = balance.of_model(policy.lm.config.get_text_config(), str(self.model))
            self.objective = replace(self.objective, balance=found)

    def _note_micro_batches(self, tokens: int) -> None:
        """Write the measured budget into the run's configuration, for later runs."""
        if self._trainer is not None and self.trainer.state.fn == "fit":
            settle(self.trainer, self.name, "max_tokens_per_micro_batch", tokens)

    def own_lm(self) -> PreTrainedModel | None:
        """Return the causal LM if it is already loaded; None: it has to be read from ``model``."""
        return None

    def configure_optimizers(self) -> Any:
        groups = self.loaded_policy.parameter_groups(self.critic.lr if self.critic else None)
        optimizer = make_optimizer(self, self.optimizer, groups)
        if self.critic is not None:
            of_head = optimizer.param_groups[-1]
            of_head["lr"] = self.critic.least_lr(of_head["lr"])
        if self.lr_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": make_scheduler(self.lr_scheduler, optimizer),
        }

    # ---------------------------------------------------------------- learning

    _iteration = 0

    @cached_property
    def learner(self) -> Learner:
        """The learner of this policy, once ``configure_model`` has loaded it.

        Raises:
            ConfigError: if it is not loaded yet.
        """
        learner = self._learner(
            self.loaded_policy,
            self.make_backend(),
            self.advantage,
            self.objective,
            self.aggregation,
            self.update,
            kl_reward=self.kl_reward,
            reference=self.reference,
            routing_replay=self.routing_replay,
            skipped=self.skipped,
            auto_micro_batches=self.auto_micro_batches,
            clock=self.clock,
        )
        learner.iteration = self._iteration
        return learner

    def make_backend(self) -> Backend:
        """Return what runs the learner's backward passes and optimizer steps."""
        return TrainerBackend(self)

    @property
    def iteration(self) -> int:
        """Number of iterations that the learner has completed."""
        return self.learner.iteration if "learner" in vars(self) else self._iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._iteration = iteration  # a checkpoint may be read before the model is loaded
        if "learner" in vars(self):
            self.learner.iteration = iteration

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Run one RL iteration on a packed batch: score, ask callbacks, update."""
        self.require_packed(batch)
        self.record(self.learner.step(batch, self.decided))

    def decided(self, batch: TensorDict) -> Objective | None:
        """Apply the callbacks' decisions, each before the next is asked; None: skip the update."""
        objective, skip = self.learner.objective, False
        for decision in answers(self.trainer, "on_update_start", batch, module=self):
            skip = skip or decision.skip or decision.stop is not None
            self.stopping = self.stopping or decision.stop
            if decision.mask is not None:
                batch["tokens", "loss_mask"] = batch["tokens", "loss_mask"] & ~decision.mask
                left = all_sum(self.skipped.trained_tokens(batch).sum())
                skip = skip or not left
            if decision.correction is not None:
                objective = replace(objective, correction=decision.correction)
                if self.update.use_rollout_logprobs:  # else every weight would be 1
                    batch["tokens", "old_logprobs"] = self.learner.trainer_logprobs(batch)
        return None if skip else objective

    def stateful_parts(self) -> dict[str, Any]:
        parts = {
            "advantage": self.advantage,
            "kl": self.objective.kl,
            "kl_reward": self.kl_reward,
            "entropy": self.objective.entropy and self.objective.entropy.schedule,
            "auto_micro_batches": self.auto_micro_batches,
        }
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
