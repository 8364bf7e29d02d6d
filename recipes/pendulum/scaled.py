"""Scale rewards by a wrapper."""

from typing import Any

import gymnasium


class ScaledReward(gymnasium.RewardWrapper):
    """Multiplies rewards by a factor."""

    def __init__(self, env: Any, factor: float) -> None:
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> float:
        """Scale the reward by the factor."""
        return self.factor * float(reward)
