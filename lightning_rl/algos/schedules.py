"""Numbers that may change from iteration to iteration: one family for coefficients and shares."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite

FAR = 10**9
"""An iteration that no run reaches."""


class Schedule(ABC):
    """A number for each iteration. A setting that takes one also takes a plain number.

    It never leaves the range between its first and its last number.
    """

    follows: ClassVar[str] = ""
    """The measured quantity that it adapts to, such as ``KL``; empty if it does not adapt."""

    @abstractmethod
    def at(self, iteration: int) -> float:
        """Return the number in an iteration, counted from 0."""

    def update(self, measured: float) -> None:
        """Adapt to the iteration's mean of the weighted quantity, if it was measured."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; empty unless the number depends on more than the iteration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""


@configurable
class ConstantSchedule(Schedule):
    """The same number in all iterations, as a plain number gives; it is saved in checkpoints.

    Raises:
        ConfigError: if the value is not finite.
    """

    def __init__(self, value: float) -> None:
        require_finite(value=value)
        self._value = value  # as configured: a resumed run is compared by it
        self.value = value

    def at(self, iteration: int) -> float:
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the present value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state.get("value", self.value)


@configurable
class LinearSchedule(Schedule):
    """Changes linearly from ``start`` to ``final`` over ``iterations`` iterations, then stays.

    Raises:
        ConfigError: for ``iterations`` below 1, or numbers that are not finite.
    """

    def __init__(self, start: float, final: float, iterations: int) -> None:
        require_finite(start=start, final=final)
        require_at_least(1, iterations=iterations)
        self.start = start
        self.final = final
        self.iterations = iterations

    def at(self, iteration: int) -> float:
        done = min(1.0, iteration / self.iterations)
        return self.start + (self.final - self.start) * done


@configurable
class ExponentialSchedule(Schedule):
    """Starts at ``start`` and is multiplied by ``decay`` each iteration t: start x decay^t.

    Raises:
        ConfigError: for a ``decay`` outside [0, 1], or a ``start`` that is not finite.
    """

    def __init__(self, start: float, decay: float) -> None:
        require_finite(start=start)
        if not 0 <= decay <= 1:
            raise ConfigError(f"ExponentialSchedule(decay={decay}) must be in [0, 1]")
        self.start = start
        self.decay = decay

    def at(self, iteration: int) -> float:
        return float(self.start * self.decay**iteration)


@configurable
class AdaptiveSchedule(ConstantSchedule):
    """Adapts once per iteration to bring the mean of the weighted quantity to ``target``.

    Args:
        value: initial value.
        target: target of the mean; None keeps ``value`` constant.

    Raises:
        ConfigError: unless both are positive and finite.
    """

    follows: ClassVar[str] = "KL"

    def __init__(self, value: float, target: float | None) -> None:
        require_finite(target=target)
        super().__init__(value)
        if value <= 0 or (target is not None and target <= 0):
            raise ConfigError(
                f"{type(self).__name__}(value={value}, target={target}): both must be > 0"
            )
        self.target = target

    def update(self, measured: float) -> None:
        # One that is not finite says nothing of where the policy is.
        if self.target is not None and math.isfinite(measured):
            self.value *= self.factor(measured, self.target)

    @abstractmethod
    def factor(self, measured: float, target: float) -> float:
        """Return the factor to multiply the value by."""


@configurable
class AdaptiveCoefficient(AdaptiveSchedule):
    """Steers the measured KL to ``target`` (Ziegler et al. 2019, section 2.2).

    value *= 1 + gain clip(kl / target - 1, -0.2, 0.2), once per iteration.

    Args:
        value: initial value.
        target: KL per token, in nats.
        gain: how fast it reacts; at most 20 % per iteration at 1.

    Raises:
        ConfigError: unless all are positive and finite.
    """

    def __init__(self, value: float = 0.01, target: float = 0.01, gain: float = 0.5) -> None:
        super().__init__(value, target)
        require_finite(gain=gain)
        if gain <= 0:
            raise ConfigError(f"AdaptiveCoefficient(gain={gain}) must be > 0")
        self.gain = gain

    def factor(self, measured: float, target: float) -> float:
        return 1 + self.gain * min(0.2, max(-0.2, measured / target - 1))


@configurable
class AdaptiveKL(AdaptiveSchedule):
    """Weights KL(old || new) per step (Schulman et al. 2017, PPO, section 4).

    After an iteration ``value`` is doubled if its mean KL was above 1.5 x ``target``, and halved if
    it was below ``target`` / 1.5. With ``loss: Surrogate`` it is PPO without a clip.

    Args:
        value: initial value.
        target: mean KL in nats; None keeps ``value`` constant.
    """

    def __init__(self, value: float = 1.0, target: float | None = 0.01) -> None:
        super().__init__(value, target)

    def factor(self, measured: float, target: float) -> float:
        if measured > 1.5 * target:
            return 2.0
        return 0.5 if measured < target / 1.5 else 1.0


@configurable
class AdaptiveEntropy(ConstantSchedule):
    """Weighs an entropy bonus while entropy is low (He et al. 2025, Skywork-OR1, arXiv 2505.22312).

    After an iteration whose mean entropy was at most ``target``, ``value`` rises by ``step``, else
    it falls, within [``low``, ``high``]. The next iteration has a bonus only in the first case:
    coef = value x 1[entropy <= target]. The first iteration has none.

    Args:
        value: initial value.
        target: entropy per token, in nats.
        step: change of the value per iteration.
        low: smallest value.
        high: largest value.

    Raises:
        ConfigError: unless ``target`` and ``step`` are positive and low <= high; all finite.
    """

    follows: ClassVar[str] = "entropy"

    def __init__(
        self,
        value: float = 0.0,
        target: float = 0.2,
        step: float = 0.005,
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        super().__init__(value)
        require_finite(target=target, step=step, low=low, high=high)
        if target <= 0 or step <= 0 or low > high:
            raise ConfigError(
                f"AdaptiveEntropy(value={value}, target={target}, step={step}, low={low}, "
                f"high={high}): target and step must be > 0, and low <= high"
            )
        self.target = target
        self.step = step
        self.low = low
        self.high = high
        self._is_low = False

    def at(self, iteration: int) -> float:
        return self.value if self._is_low else 0.0

    def update(self, measured: float) -> None:
        if not math.isfinite(measured):
            return
        self._is_low = measured <= self.target
        moved = self.value + (self.step if self._is_low else -self.step)
        self.value = min(self.high, max(self.low, moved))

    def state_dict(self) -> dict[str, Any]:
        """Return the value, and whether it weighs anything in the next iteration."""
        return super().state_dict() | {"is_low": self._is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_low = state.get("is_low", False)


def schedule_of(
    number: float | Schedule,
    name: str,
    low: float = -math.inf,
    high: float = math.inf,
    measured: str = "",
) -> Schedule:
    """Return the setting ``name`` as a schedule of numbers in [low, high].

    ``measured``: the quantity whose mean it gets after each iteration.

    Raises:
        ConfigError: for numbers out of range, or a schedule that adapts to another quantity.
    """
    if not isinstance(number, Schedule):
        require_finite(**{name: number})
        number = ConstantSchedule(number)
    if number.follows not in ("", measured):
        raise ConfigError(
            f"{name}={type(number).__name__}: it adapts to a measured {number.follows}, but {name} "
            f"{f'measures {measured}' if measured else 'does not measure one'}; use a number, "
            "LinearSchedule or ExponentialSchedule"
        )
    for value in (number.at(0), number.at(FAR)):
        if not low <= value <= high:
            bounds = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
            raise ConfigError(f"{name}={value} must be {bounds}")
    return number
