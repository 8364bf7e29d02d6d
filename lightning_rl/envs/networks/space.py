"""What a group of agents observes and does, in terms that networks are built from."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_rl.errors import ConfigError


@dataclass(frozen=True)
class Observed:
    """An observation: ``shape`` without environments, time and agents."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        """Numbers in one of them."""
        return prod(self.shape)


@dataclass(frozen=True)
class Discrete:
    """An action that is one of ``n``; ``one_hot`` if the environment wants it so."""

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
        """How many they are."""
        return self.low.numel()

    def __str__(self) -> str:
        return f"{self.size} numbers within [{float(self.low.min()):g}, {float(self.high.max()):g}]"


def within(kind: "ActionKind", action: Tensor) -> Tensor:
    """The action as an environment takes it: real numbers within their bounds."""
    return action.clamp(kind.low, kind.high) if isinstance(kind, Continuous) else action


def mask_of(action: str) -> str:
    """The name of the observation that says which choices of an action are allowed."""
    return f"{action}_mask"


def allowed_only(values: Tensor, allowed: Tensor | None) -> Tensor:
    """Logits, or values, (*B, n), with -inf where a choice is not allowed; None: all are."""
    return values if allowed is None else values.masked_fill(~allowed.bool(), -torch.inf)


ActionKind = Discrete | MultiDiscrete | Binary | Continuous


@dataclass(frozen=True)
class Space:
    """What a group of agents sees and does.

    Args:
        observations: by name.
        actions: by name.
        agents: agents in the group, a dimension of all of its tensors; 0: it is one, without.
        mask: the name of the observation that says which agents act; None: all always do.
    """

    observations: Mapping[str, Observed]
    actions: Mapping[str, ActionKind]
    agents: int = 0
    mask: str | None = None

    @property
    def described(self) -> str:
        """What they see and do, in words that follow the group's name."""
        seen = ", ".join(f"{n} {o.shape}" for n, o in self.observations.items())
        acts = ", ".join(f"{n} ({kind})" for n, kind in self.actions.items())
        several = f" ({self.agents} of them)" if self.agents else ""
        return f"{several} sees {seen} and does {acts}"

    def observed(self, names: list[str] | None, what: str) -> dict[str, Observed]:
        """The named observations, or all that hold numbers.

        Raises:
            ConfigError: if there is none of a name, or none at all.
        """
        flags = (self.mask, *map(mask_of, self.actions))
        if names is None:
            found = {n: o for n, o in self.observations.items() if n not in flags}
        else:
            unknown = [name for name in names if name not in self.observations]
            if unknown:
                raise ConfigError(
                    f"{what}: there is no observation {unknown[0]!r}; the environment has "
                    f"{', '.join(self.observations) or 'none'}"
                )
            found = {name: self.observations[name] for name in names}
        if not found:
            raise ConfigError(f"{what}: the environment shows nothing that it could read")
        return found


def require_same(ours: Mapping[str, Space], theirs: Mapping[str, Space]) -> None:
    """Refuse an environment to evaluate in that shows agents something else than the other.

    Raises:
        ConfigError: naming the agent.
    """
    if ours.keys() != theirs.keys():
        raise ConfigError(
            f"data.eval_env has agents {', '.join(theirs)}, and data.env has {', '.join(ours)}"
        )
    for name, space in ours.items():
        if space.observations != theirs[name].observations:
            raise ConfigError(
                f"data.eval_env shows agent {name!r} something else than data.env does: "
                f"{theirs[name].observations} and {space.observations}"
            )
