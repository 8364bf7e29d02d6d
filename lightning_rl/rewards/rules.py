"""Ready-made rewards."""

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError


@configurable
class OverlongPenalty:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), to be added to another reward.

    0 up to ``max_tokens - buffer`` tokens, then linearly down to -1 at ``max_tokens``, -1 beyond.

    Args:
        max_tokens: longest completion; not above ``sampling.max_tokens``.
        buffer: tokens over which the penalty grows.

    Raises:
        ConfigError: unless 0 < buffer <= max_tokens.
    """

    def __init__(self, max_tokens: int, buffer: int) -> None:
        if not 0 < buffer <= max_tokens:
            raise ConfigError(
                f"OverlongPenalty(max_tokens={max_tokens}, buffer={buffer}): need 0 < buffer <= "
                "max_tokens"
            )
        self.max_tokens = max_tokens
        self.buffer = buffer
        self.__name__ = "overlong"

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        allowed = self.max_tokens - self.buffer
        return [-min(1.0, max(0.0, (len(ids) - allowed) / self.buffer)) for ids in completion_ids]


class EnvironmentReward:
    """What the environment of each rollout paid, summed over its turns.

    Raises:
        ConfigError: when called for rollouts of an agent that has no environment.
    """

    def __init__(self) -> None:
        self.__name__ = "environment"

    def __call__(self, environment_rewards: list[float | None]) -> list[float]:
        if None in environment_rewards:
            raise ConfigError(
                "EnvironmentReward needs an agent with an environment, which this one has not; set "
                "data.agent, e.g. to MultiTurn, or name another reward"
            )
        return [reward for reward in environment_rewards if reward is not None]
