"""The library's errors: each message names the value, the bound it broke and the fix."""


class LightningRLError(Exception):
    """Root of every error raised on purpose by lightning_rl."""


class ConfigError(LightningRLError, ValueError):
    """A setting is impossible, or contradicts another one."""


class DataError(LightningRLError, ValueError):
    """A prompt or rollout file does not hold what it should; names file and line."""


class RewardError(LightningRLError):
    """Too large a share of rollouts could not be graded."""


class FilterError(LightningRLError):
    """Group filters reject so much that no batch comes together."""


class EngineError(LightningRLError):
    """The generation engine is missing, broken or not ready."""


class WeightSyncError(EngineError):
    """After a weight sync, engine and trainer do not agree."""


def require_at_least(bound: float, **values: float | None) -> None:
    """Refuse settings below a bound; None passes.

    Raises:
        ConfigError: naming the first key, its value and the bound.
    """
    for name, value in values.items():
        if value is not None and value < bound:
            raise ConfigError(f"{name}={value} must be >= {bound:g}")
