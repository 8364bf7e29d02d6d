"""EnvMaker: an environment's configuration, from which it is created."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.config.hints import did_you_mean, import_object, parameters
from lightning_rl.errors import ConfigError
from lightning_rl.run.loop.stacks import name_crashes

AGENT = "agent"
"""The name of the single agent of an environment without groups."""

Part = str | dict[str, Any]
"""A class or function by its import path; alone, or as ``{class_path: ..., init_args: ...}``."""


class EnvMaker(ABC):
    """An environment's name and configuration, not created yet; ``collector_of`` gives its
    collector.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """How messages and reports call it."""


@configurable
class TorchRLEnv(EnvMaker):
    """Any torchrl environment: a class path, arguments, and transforms.

    Args:
        make: the import path of an ``EnvBase``, such as ``torchrl.envs.VmasEnv``, or of a function
            that returns one.
        arguments: passed to it.
        transforms: applied to it in this order: e.g. ``torchrl.envs.ObservationNorm``, alone or
            with ``class_path`` and ``init_args``.
        parallel: step each environment in its own process, for slow ones.
        seeded: True if the environment is deterministic given its seed; False: it is not, and a
            resumed run is not bit-equal.

    Raises:
        ConfigError: if there is no such class, or, on creation, if it refuses its arguments.
    """

    def __init__(
        self,
        make: str,
        arguments: dict[str, Any] | None = None,
        transforms: list[str | dict[str, Any]] | None = None,
        parallel: bool = False,
        seeded: bool = True,
    ) -> None:
        self.make = make
        self.arguments = arguments or {}
        self.transforms = transforms or []
        self.parallel = parallel
        self.seeded = seeded

    @property
    def name(self) -> str:
        names = ("env_name", "scenario", "task")
        what = next(
            (self.arguments[n] for n in names if isinstance(self.arguments.get(n), str)), ""
        )
        return f"{self.make.rsplit('.', 1)[-1]} {what}".strip()

    def made(self) -> Any:
        """Create one environment, with its transforms.

        Raises:
            ConfigError: names the part and its message.
        """
        require_installed("torchrl", "TorchRLEnv")
        name_crashes()  # of the environment
        env = built(self.make, self.arguments, "data.env.make")
        from torchrl.envs import Compose, EnvBase, TransformedEnv

        if not isinstance(env, EnvBase):
            raise ConfigError(
                f"data.env.make: {self.make} gives {type(env).__name__}, which is not a torchrl "
                "EnvBase; for a gymnasium environment use Gym"
            )
        if not self.transforms:
            return env
        transforms = [built_part(t, f"transforms[{i}]") for i, t in enumerate(self.transforms)]
        return TransformedEnv(env, Compose(*transforms))


def built_part(part: Part, key: str) -> Any:
    """Build a configured part.

    Raises:
        ConfigError: names the key, if the class does not exist or refuses its arguments.
    """
    if isinstance(part, str):
        return built(part, {}, key)
    unknown = [name for name in part if name not in ("class_path", "init_args")]
    if "class_path" not in part or unknown:
        got = ", ".join(map(str, part)) or "nothing"
        raise ConfigError(f"{key}: expected class_path and init_args, got {got}")
    return built(part["class_path"], part.get("init_args") or {}, key)


def built(path: str, arguments: Mapping[str, Any], key: str) -> Any:
    """Call the object at an import path.

    Raises:
        ConfigError: names the key.
    """
    try:
        component = import_object(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    try:
        return component(**arguments)
    except TypeError as error:
        known = parameters(component)
        wrong = next((name for name in arguments if name not in known), None)
        meant = "" if wrong is None else did_you_mean(wrong, list(known))
        raise ConfigError(f"{key}: {path}({_shown(arguments)}): {error}{meant}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: {path}({_shown(arguments)}) failed: {what}") from error


def built_loss(path: str, own: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Create a torchrl loss from our own arguments for it and the user's.

    Raises:
        ConfigError: names the argument that it does not take, or that is ours to set.
    """
    known = set(parameters(import_object(path)))
    for name in arguments:  # torchrl's take any keyword, and drop what none of them knows
        if name in own or name == "reduction":
            raise ConfigError(f"loss: {name} cannot be set; the module sets it")
        if name not in known:
            raise ConfigError(f"loss: {path} takes no {name!r}{did_you_mean(name, sorted(known))}")
    return built(path, {**own, **arguments}, "loss")


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.60}" for name, value in arguments.items())


def require_installed(package: str, who: str) -> None:
    """Refuse to continue without a package.

    Raises:
        ConfigError: names it, and how to install it.
    """
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ConfigError(
            f"{who} needs {package}, which is not installed; run "
            "`pip install 'torchrl>=0.14.1,<0.15' 'gymnasium>=1.2'`"
        )
