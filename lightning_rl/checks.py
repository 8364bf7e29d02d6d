"""Which parts of an algorithm do not go together; each refusal says what to change."""

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.kl import KLPenalty
from lightning_rl.algos.objective import Objective
from lightning_rl.errors import ConfigError
from lightning_rl.models.reference import Reference


def check_parts(
    advantage: Advantage,
    objective: Objective,
    *,
    has_critic: bool,
    kl_reward: KLPenalty | None,
    reference: Reference | None,
    trust_engine_logprobs: bool,
    max_grad_norm: float | None,
) -> None:
    """Check what ``PolicyModule`` was given.

    Raises:
        ConfigError: naming the keys that contradict each other.
    """
    if max_grad_norm is not None and max_grad_norm <= 0:
        raise ConfigError(f"max_grad_norm={max_grad_norm} must be > 0; null for no clipping")
    if advantage.needs_values and not has_critic:
        raise ConfigError(
            f"advantage={type(advantage).__name__} needs a critic; set value_head to "
            "SharedValueHead or SeparateValueHead"
        )
    if objective.value_warmup_iterations and not advantage.needs_values:
        raise ConfigError(
            f"value_warmup_iterations={objective.value_warmup_iterations} needs a critic to warm "
            "up; set advantage to GAE, or leave it out"
        )
    if reference is not None and objective.kl is None and kl_reward is None:
        raise ConfigError(
            f"reference={type(reference).__name__} is compared with nothing; set kl or kl_reward, "
            "or leave it out"
        )
    if trust_engine_logprobs and objective.correction is not None:
        raise ConfigError(
            f"correction={type(objective.correction).__name__} has nothing to correct with "
            "trust_engine_logprobs=true, which takes the engine's logprobs for the old ones; leave "
            "one of them out"
        )
