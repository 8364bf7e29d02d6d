"""PolicyModule: everything that is learning. One Lightning batch is one RL iteration."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algos.advantages import GRPO, Advantage
from lightning_rl.algos.aggregation import Aggregation, TokenMean
from lightning_rl.algos.kl import KLPenalty
from lightning_rl.algos.losses import PolicyLoss, PPOClip, ValueLoss
from lightning_rl.data.packing import select, split_minibatches, split_packs, token_rows
from lightning_rl.errors import ConfigError
from lightning_rl.hooks import call_hook
from lightning_rl.hparams import save_primitive_hparams
from lightning_rl.metrics import TokenMetrics
from lightning_rl.models.heads import ValueHead
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Rollout
from lightning_rl.seeding import run_seed
from lightning_rl.stages import StageClock


class PolicyModule(LightningModule):
    """Wraps a causal LM (policy head, optional value head) and improves it from rollouts.

    ``training_step`` runs the named steps below on one packed batch; each can be called by itself.

    Args:
        model: directory or hub name of the causal LM to train.
        advantage: how rewards become credit; ``GRPO()`` or ``GAE()`` (needs ``value_head``).
        loss: policy loss.
        aggregation: how token losses are averaged.
        value_head: critic, for ``GAE``: ``SharedValueHead()`` or ``SeparateValueHead()``.
        value_loss: the critic's loss.
        kl: penalty against a frozen copy of the initial policy; None for none.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.
        value_lr: learning rate of the critic's own parameters; None: as the policy's.
        ppo_epochs: passes over each collected batch.
        minibatches: optimizer steps per pass; whole groups are dealt to them at random.
        max_tokens_per_pack: forward tokens in one forward/backward (bounds memory).
        max_grad_norm: clip the gradient's global norm; None: leave it.
        gradient_checkpointing: recompute activations in backward.
        random_init: start from random weights instead of those in ``model``.
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
        kl: KLPenalty | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        value_lr: float | None = None,
        ppo_epochs: int = 1,
        minibatches: int = 1,
        max_tokens_per_pack: int = 16384,
        max_grad_norm: float | None = 1.0,
        gradient_checkpointing: bool = False,
        random_init: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("ppo_epochs", ppo_epochs),
            ("minibatches", minibatches),
            ("max_tokens_per_pack", max_tokens_per_pack),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value} must be >= 1")
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm={max_grad_norm} must be > 0; null for no clipping")
        if advantage.needs_values and value_head is None:
            raise ConfigError(
                f"advantage={type(advantage).__name__} needs a critic; set value_head to "
                "SharedValueHead or SeparateValueHead"
            )
        save_primitive_hparams(self)
        self.automatic_optimization = False
        self.model = model
        self.advantage = advantage
        self.loss = loss
        self.aggregation = aggregation
        self.value_loss = value_loss
        self.kl = kl
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.value_lr = value_lr
        self.ppo_epochs = ppo_epochs
        self.minibatches = minibatches
        self.max_tokens_per_pack = max_tokens_per_pack
        self.max_grad_norm = max_grad_norm
        self.gradient_checkpointing = gradient_checkpointing
        self.random_init = random_init
        self.seed = run_seed(seed)
        self.policy: Policy | None = None
        self.reference: Policy | None = None
        self._value_head = (value_head,)  # a tuple hides it from nn.Module until it is configured
        self.clock = StageClock()
        self.iteration = 0
        self._recorded: dict[str, float] = {}

    # ---------------------------------------------------------------- set-up

    def configure_model(self) -> None:
        """Load the model (once); Lightning calls this under the strategy's own context."""
        if self.policy is not None:
            return
        self.policy = Policy(
            self.model, self._value_head[0], self.random_init, self.gradient_checkpointing
        )
        if self.kl is not None:
            self.reference = Policy(self.model).requires_grad_(False).eval()
            self.reference.lm.load_state_dict(self.policy.lm.state_dict())

    def configure_optimizers(self) -> Any:
        policy = self._policy()
        critic = [] if policy.value_head is None else list(policy.value_head.parameters())
        groups: list[dict[str, Any]] = [{"params": list(policy.lm.parameters())}]
        if critic:
            groups.append(
                {"params": critic} | ({} if self.value_lr is None else {"lr": self.value_lr})
            )
        optimizer = self.optimizer(groups)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    # ---------------------------------------------------------------- the named steps

    def compute_old_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``old_logprobs`` (T,), the policy's before any update (and ``values``, for a critic)."""
        with self.clock("logprob"):
            return self._score(self._policy(), batch, "old_logprobs")

    def compute_ref_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add ``ref_logprobs`` (T,) of the frozen reference; needs ``kl``."""
        if self.reference is None:
            raise ConfigError("compute_ref_logprobs needs a reference: set kl, e.g. K3Penalty()")
        with self.clock("logprob"):
            return self._score(self.reference, batch, "ref_logprobs")

    def compute_values(self, batch: TensorDict) -> TensorDict:
        """Add ``values`` (T,) of the critic; free if ``compute_old_logprobs`` ran before."""
        if self._policy().value_head is None:
            raise ConfigError("compute_values needs a critic: set value_head")
        return batch if "values" in batch["tokens"] else self.compute_old_logprobs(batch)

    def compute_advantages(self, batch: TensorDict) -> TensorDict:
        """Add ``advantages`` (T,), and ``returns`` (T,) with a critic."""
        return self.advantage(batch)

    def update(self, batch: TensorDict) -> dict[str, float]:
        """PPO epochs x minibatches x packs of optimisation; returns the iteration's metrics."""
        metrics = TokenMetrics()
        with self.clock("train"):
            for epoch in range(self.ppo_epochs):
                # Stateless, so that a resumed run deals the same minibatches.
                seed = (self.seed * 1_000_003 + self.iteration) * 1_000_003 + epoch
                generator = torch.Generator().manual_seed(seed)
                for rows in split_minibatches(batch, self.minibatches, generator):
                    self._optimize(select(batch, rows), metrics)
        return metrics.compute()

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """One RL iteration on a packed batch."""
        # With one update per batch the current policy is the old one: nothing to recompute.
        if self.ppo_epochs * self.minibatches > 1:
            batch = self.compute_old_logprobs(batch)
        if self.advantage.needs_values:
            batch = self.compute_values(batch)
        if self.kl is not None:
            batch = self.compute_ref_logprobs(batch)
        batch = self.compute_advantages(batch)
        self.record(self.update(batch))
        self.iteration += 1

    def validation_step(self, batch: dict[str, float], batch_idx: int) -> None:
        """Log ``eval/*`` of the held-out rollouts (``lightning-rl validate`` and ``test``)."""
        self.log_dict(batch, batch_size=1, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Rollout], batch_idx: int) -> list[Rollout]:
        """Collected rollouts as they are (``lightning-rl rollout``)."""
        return batch

    # ---------------------------------------------------------------- inside the steps

    def _policy(self) -> Policy:
        if self.policy is None:
            raise ConfigError("the model is not loaded yet; call configure_model() first")
        return self.policy

    @torch.no_grad()
    def _score(self, policy: Policy, batch: TensorDict, name: str) -> TensorDict:
        tokens = batch["tokens"]
        outputs = {name: torch.zeros_like(tokens["rollout_logprobs"])}
        for rows in split_packs(batch, self.max_tokens_per_pack):
            pack = select(batch, rows)
            scores = policy(pack)
            where = torch.isin(token_rows(batch), rows.to(tokens.device)).nonzero().squeeze(1)
            live = where[scores.live]
            outputs[name][live] = scores.logprobs
            if scores.values is not None:
                outputs.setdefault("values", torch.zeros_like(outputs[name]))[live] = scores.values
        tokens.update(outputs)
        return batch

    def _optimize(self, minibatch: TensorDict, metrics: TokenMetrics) -> None:
        """One optimizer step on a minibatch, its gradient accumulated over packs."""
        optimizer = self.optimizers()
        minibatch["tokens", "loss_weights"] = self.aggregation(minibatch)
        optimizer.zero_grad()
        for rows in split_packs(minibatch, self.max_tokens_per_pack):
            loss, pack_metrics = self._pack_loss(select(minibatch, rows))
            self.manual_backward(loss)
            metrics.add(pack_metrics)
        parameters = [p for p in self._policy().parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm or float("inf"))
        metrics.add(
            {
                "policy/grad_norm": norm.reshape(1),
                "policy/lr": torch.tensor([optimizer.param_groups[0]["lr"]]),
            }
        )
        optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_schedulers().step()

    def _pack_loss(self, pack: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        scores = self._policy()(pack)
        tokens = pack["tokens"][scores.live]
        tokens["row"] = token_rows(pack)[scores.live]
        if "old_logprobs" not in tokens:
            tokens["old_logprobs"] = scores.logprobs.detach()
        loss, extra = self.loss(scores.logprobs, tokens)
        metrics = {f"policy/{name}": value for name, value in extra.items()}
        metrics |= {"policy/loss": loss, "policy/entropy": scores.entropy}
        gap = (tokens["old_logprobs"] - tokens["rollout_logprobs"]).abs()
        metrics |= {"rollout/logprob_gap_mean": gap, "rollout/logprob_gap_max": gap}
        if self.kl is not None:
            penalty = self.kl(scores.logprobs, tokens["ref_logprobs"])
            loss = loss + self.kl.coef * penalty
            metrics["policy/kl_ref"] = penalty
        if self.advantage.needs_values:
            value_loss, extra = self.value_loss(scores.values, tokens)
            loss = loss + value_loss
            metrics |= {f"value/{name}": value for name, value in extra.items()}
        return (loss * tokens["loss_weights"]).sum(), metrics

    # ---------------------------------------------------------------- metrics and state

    def record(self, metrics: dict[str, float]) -> None:
        """Add metrics to this iteration's row; callbacks use this instead of ``self.log``.

        They reach ``trainer.callback_metrics`` at once (``ModelCheckpoint(monitor=...)`` works) and
        the loggers in one call when the iteration ends.
        """
        self._recorded |= metrics
        self.trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in metrics.items()}
        )

    def flush_metrics(self) -> None:
        """Write the row of recorded metrics to every logger, at step ``iteration``."""
        if self._recorded:
            metrics, self._recorded = self._recorded, {}
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step=self.iteration)
            call_hook(self.trainer, "on_iteration_end", metrics)

    # Lightning runs these after the callbacks' own, so that one row holds what all of them recorded.
    def on_train_start(self) -> None:
        self.flush_metrics()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.flush_metrics()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Most checkpoints are taken before the iteration's row is written.
        checkpoint["lightning_rl"] = {"iteration": self.iteration, "recorded": self._recorded}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.iteration = checkpoint["lightning_rl"]["iteration"]
        self._recorded = dict(checkpoint["lightning_rl"]["recorded"])
