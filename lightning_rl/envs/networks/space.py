"""Observations and actions of a group of agents, in the terms that networks are built from."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_rl.errors import ConfigError


@dataclass(frozen=True)
class Observed:
    """An observation; ``shape`` excludes environments, time and agents."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        """Number of elements of one observation."""
        return prod(self.shape)


@dataclass(frozen=True)
class Discrete:
    """A choice of one of ``n``; ``one_hot`` if the environment expects it so."""

    n: int
    one_hot: bool = False

    def __str__(self) -> str:
        return f"one of {self.n}"


@dataclass(frozen=True)
class MultiDiscrete:
    """Several choices at once, one of each of ``ns``."""

    ns: tuple[int, ...]

    def __str__(self) -> str:
        return f"one of each of {', '.join(map(str, self.ns))}"


@dataclass(frozen=True)
class Binary:
    """``n`` switches, each on or off."""

    n: int

    def __str__(self) -> str:
        return f"{self.n} switches"


@dataclass(frozen=True, eq=False)
class Continuous:
    """Real numbers within bounds, (D,) each; infinite where there is none."""

    low: Tensor
    high: Tensor

    @property
    def size(self) -> int:
        """Number of elements of the action."""
        return self.low.numel()

    def __str__(self) -> str:
        return f"{self.size} numbers within [{float(self.low.min()):g}, {float(self.high.max()):g}]"


def within(kind: "ActionKind", action: Tensor) -> Tensor:
    """Return the action as an environment accepts it: real numbers clipped to their bounds."""
    return action.clamp(kind.low, kind.high) if isinstance(kind, Continuous) else action


def mask_of(action: str) -> str:
    """Return the name of the observation that tells which choices of an action are allowed."""
    return f"{action}_mask"


def allowed_only(values: Tensor, allowed: Tensor | None) -> Tensor:
    """Set logits or values (*B, n) to -inf where a choice is not allowed; None: all are."""
    return values if allowed is None else values.masked_fill(~allowed.bool(), -torch.inf)


ActionKind = Discrete | MultiDiscrete | Binary | Continuous


@dataclass(frozen=True)
class Space:
    """Observations and actions of a group of agents.

    Args:
        observations: by name.
        actions: by name.
        agents: number of agents in the group, a dimension of all its tensors; 0: a single agent,
            without that dimension.
        mask: name of the observation that tells which agents act; None: all always do.
    """

    observations: Mapping[str, Observed]
    actions: Mapping[str, ActionKind]
    agents: int = 0
    mask: str | None = None

    @property
    def described(self) -> str:
        """Describe the observations and actions in words that follow the group's name."""
        seen = ", ".join(f"{n} {o.shape}" for n, o in self.observations.items())
        acts = ", ".join(f"{n} ({kind})" for n, kind in self.actions.items())
        several = f" ({self.agents} of them)" if self.agents else ""
        return f"{several} sees {seen} and does {acts}"

    def observed(self, names: list[str] | None, what: str) -> dict[str, Observed]:
        """Return the named observations, or all numeric ones.

        Raises:
            ConfigError: if a name does not exist, or there are none at all.
        """
        flags = (self.mask, *map(mask_of, self.actions))
        if names is None:
            result = {n: o for n, o in self.observations.items() if n not in flags}
        else:
            unknown = [name for name in names if name not in self.observations]
            if unknown:
                raise ConfigError(
                    f"{what}: there is no observation {unknown[0]!r}; the environment has "
                    f"{', '.join(self.observations) or 'none'}"
                )
            result = {name: self.observations[name] for name in names}
        if not result:
            raise ConfigError(f"{what}: the environment shows no observation that it can read")
        return result


def require_same(ours: Mapping[str, Space], theirs: Mapping[str, Space]) -> None:
    """Refuse an evaluation environment whose agents' observations differ.

    Raises:
        ConfigError: names the agent.
    """
    if ours.keys() != theirs.keys():
        raise ConfigError(
            f"data.eval_env has agents {', '.join(theirs)}, but data.env has {', '.join(ours)}"
        )
    for name, space in ours.items():
        if space.observations != theirs[name].observations:
            raise ConfigError(
                f"data.eval_env shows agent {name!r} other observations than data.env does: "
                f"{theirs[name].observations}, not {space.observations}"
            )
