"""The reward that an agent's environment paid."""

from lightning_rl.errors import ConfigError


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
