"""Gym: gymnasium environments, stepped by hand, so that each episode has its own seed."""

from typing import Any

import numpy as np
import torch

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.maker import EnvMaker, built_part, require_installed
from lightning_rl.envs.networks.space import (
    ActionKind,
    Binary,
    Continuous,
    Discrete,
    MultiDiscrete,
    Observed,
    Space,
)
from lightning_rl.errors import ConfigError

OBSERVATION = "observation"
ACTION = "action"


@configurable
class Gym(EnvMaker):
    """A gymnasium environment, given by name.

    Args:
        name: such as ``CartPole-v1``; ``my_module:MyEnv-v0`` imports ``my_module`` first.
        arguments: passed to ``gymnasium.make``.
        wrappers: wrappers of the environment, the innermost first, e.g.
            ``gymnasium.wrappers.FlattenObservation``. A wrapper gets the environment as its first
            argument.
    """

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        wrappers: list[str | dict[str, Any]] | None = None,
    ) -> None:
        self._name = name
        self.arguments = arguments or {}
        self.wrappers = wrappers or []
        self._registered: Any = None
        """The gymnasium registration, to make it in another process."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def plain(self) -> "Gym":
        """The environment without settings of processes, to be sent to one.

        Raises:
            ConfigError: if it is defined in the script itself, which no other process imports.
        """
        import gymnasium

        plain = Gym(self.name, self.arguments, self.wrappers)
        if ":" not in self.name:  # else the module that is imported first registers it
            plain._registered = gymnasium.registry.get(self.name)
        if any(place.split(":")[0].split(".")[0] == "__main__" for place in plain._places()):
            raise ConfigError(
                f"data.env: {self.name}, or a wrapper of it, is defined in the script itself, "
                "which other processes do not import; move it to a module of its own, and name it "
                "'that_module:...'"
            )
        return plain

    def _places(self) -> list[str]:
        """Return the import paths of its parts, as far as they are known here."""
        entry = getattr(self._registered, "entry_point", None)
        paths = [self.name, entry if isinstance(entry, str) else getattr(entry, "__module__", "")]
        return paths + [
            w if isinstance(w, str) else str(w.get("class_path")) for w in self.wrappers
        ]

    def made(self, **further: Any) -> Any:
        """Create one ``gymnasium.Env``; ``further`` arguments, such as ``render_mode``, take
        precedence.

        Raises:
            ConfigError: with gymnasium's message.
        """
        require_installed("gymnasium", "Gym")
        import gymnasium

        if self._registered is not None:
            gymnasium.registry.setdefault(self._registered.id, self._registered)
        try:
            env = gymnasium.make(
                self._name, **{"disable_env_checker": True} | self.arguments | further
            )
        except Exception as error:  # whatever the constructor raises, or a missing simulator
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"data.env: gymnasium cannot make {self._name!r}: {what}") from error
        for index, wrapper in enumerate(self.wrappers):
            part: dict[str, Any] = {}
            part |= {"class_path": wrapper} if isinstance(wrapper, str) else wrapper
            part["init_args"] = {"env": env} | (part.get("init_args") or {})
            env = built_part(part, f"data.env.wrappers[{index}]")
        return env


# ---------------------------------------------------------------- spaces


def space_of(env: Any) -> Space:
    """Convert gymnasium's spaces.

    Raises:
        ConfigError: for a space that no body or head supports.
    """
    from gymnasium import spaces

    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, spaces.Space):
            raise ConfigError(
                f"data.env: {name} of {type(env.unwrapped).__name__} is {space!r:.80}; gymnasium "
                "requires one of its spaces, such as Box or Discrete"
            )
    seen = env.observation_space
    parts = dict(seen.spaces) if isinstance(seen, spaces.Dict) else {OBSERVATION: seen}
    return Space(
        {name: _observed(name, part) for name, part in parts.items()},
        {ACTION: _action(env.action_space)},
    )


def _observed(name: str, space: Any) -> Observed:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Observed((int(space.n),))  # one-hot
    if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        return Observed(tuple(space.shape), torch.uint8 if holds_bytes(space) else torch.float32)
    raise ConfigError(
        f"data.env: observation {name!r} is a {type(space).__name__}, which no body can read; wrap "
        "it (gymnasium.wrappers.FlattenObservation), or use TorchRLEnv"
    )


def holds_bytes(space: Any) -> bool:
    """Return True if its numbers are stored as bytes, which are never negative."""
    if space.dtype == np.int8:
        return not hasattr(space, "low") or bool((space.low >= 0).all())
    return space.dtype in (np.uint8, np.bool_)


def _action(space: Any) -> ActionKind:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return MultiDiscrete(tuple(map(int, space.nvec)))
    if isinstance(space, spaces.MultiBinary) and isinstance(space.n, int | np.integer):
        return Binary(int(space.n))
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        bounds = (torch.as_tensor(bound, dtype=torch.float32) for bound in (space.low, space.high))
        return Continuous(*bounds)
    raise ConfigError(
        f"data.env: actions are a {type(space).__name__} of shape {space.shape}, which no head "
        "supports; wrap it, or use TorchRLEnv"
    )
