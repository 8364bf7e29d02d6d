"""UpdateSettings: the numbers of an update."""

from dataclasses import dataclass
from typing import Literal

from lightning_rl.algos.kl import check_target_kl
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.learn.auto_micro_batches import DEFAULT


@configurable
@dataclass(frozen=True)
class UpdateSettings:
    """How an update goes through a batch.

    Args:
        ppo_epochs: passes over each batch.
        minibatches: optimizer steps per pass; whole groups are dealt to them at random.
        target_kl: make no further pass over a batch once a pass's mean ``policy/kl_old`` exceeds
            this, in nats per token; None: make all passes.
        max_tokens_per_micro_batch: tokens per forward and backward pass, which bounds memory.
            ``auto``: as many as fit on the GPU, measured before the first update, and then kept in
            checkpoints and in the run's ``config.yaml``; on a CPU 16,384.
        max_grad_norm: clip the gradient's global norm to this; None: do not clip.
        use_rollout_logprobs: use the engine's logprobs as the old ones instead of recomputing
            them.
        mask_truncated: exclude rollouts that reached ``max_tokens`` from the loss (DAPO's overlong
            filtering).
        seed: seed by which groups are dealt to minibatches; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    ppo_epochs: int = 1
    minibatches: int = 1
    target_kl: float | None = None
    max_tokens_per_micro_batch: int | Literal["auto"] = DEFAULT
    max_grad_norm: float | None = 1.0
    use_rollout_logprobs: bool = False
    mask_truncated: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        require_at_least(
            1,
            ppo_epochs=self.ppo_epochs,
            minibatches=self.minibatches,
            max_tokens_per_micro_batch=self.tokens_per_micro_batch,
        )
        require_finite(max_grad_norm=self.max_grad_norm)
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(
                f"max_grad_norm={self.max_grad_norm} must be > 0; null for no clipping"
            )
        check_target_kl(self.target_kl, ppo_epochs=self.ppo_epochs)

    @property
    def tokens_per_micro_batch(self) -> int:
        """The tokens of a forward and backward pass, where they are not measured yet."""
        return (
            DEFAULT
            if self.max_tokens_per_micro_batch == "auto"
            else self.max_tokens_per_micro_batch
        )

    @property
    def steps(self) -> int:
        """The optimizer steps of an iteration, unless ``target_kl`` ends it early."""
        return self.ppo_epochs * self.minibatches
