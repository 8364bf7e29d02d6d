"""The collectors of all kinds of environments."""

from collections.abc import Callable
from typing import Any

from lightning_rl.envs.collector import EnvCollector
from lightning_rl.envs.gym import Gym
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.maker import EnvMaker, TorchRLEnv
from lightning_rl.envs.pool import PooledCollector, PooledGym
from lightning_rl.envs.torchrl_collector import TorchRLCollector
from lightning_rl.errors import ConfigError

COLLECTORS: dict[type[EnvMaker], Callable[[Any, int | None, float], EnvCollector]] = {
    Gym: GymCollector,
    PooledGym: PooledCollector,
    TorchRLEnv: TorchRLCollector,
}
"""The collector of each kind of environment, and of kinds derived from it."""


def collector_of(
    env: EnvMaker, max_episode_length: int | None, max_step_seconds: float
) -> EnvCollector:
    """Return the default collector of an environment.

    For environments of another kind add theirs: ``COLLECTORS[MyMaker] = MyCollector``.

    Raises:
        ConfigError: if there is none.
    """
    for kind in type(env).__mro__:
        if kind in COLLECTORS:
            return COLLECTORS[kind](env, max_episode_length, max_step_seconds)
    raise ConfigError(
        f"data.env: there is no collector for {type(env).__name__}; set data.collector, or add one "
        "to lightning_rl.envs.collectors.COLLECTORS"
    )
