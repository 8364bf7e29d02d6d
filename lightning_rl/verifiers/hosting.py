"""Which verifiers environment is hosted, by which Python, with which settings."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_rl.errors import ConfigError
from lightning_rl.serving.variables import NO_PROXY, passed_on, require_set

_KEPT = ("SSL_CERT_FILE", "HF_HOME", "HF_HUB_OFFLINE", "NLTK_DATA", "XDG_CACHE_HOME")
"""What a worker gets besides what any program does: where things are, and no keys."""


@dataclass(frozen=True)
class Hosting:
    """Which environment, hosted by which Python; ``options`` and ``env`` as in `VerifiersAgent`."""

    environment: str
    python: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.environment:
            raise ConfigError("environment is empty; name a package that exports a taskset")
        if "id" in self.options.get("taskset", {}):
            raise ConfigError("options.taskset.id is what `environment` says; leave it out")

    @property
    def key(self) -> str:
        """Equal where the same worker would do."""
        parts = [self.environment, self.program, self.options, self.env, self.pass_env]
        return json.dumps(parts, sort_keys=True, default=str)

    @property
    def program(self) -> str:
        """The interpreter's path; of a virtual environment's directory, that of its Python.

        A link is not followed: Python finds its environment by where it was started.
        """
        path = Path(self.python).expanduser()
        named = path.name.startswith("python") and not path.is_dir()
        return str((path if named else path / "bin" / "python").absolute())

    def check(self) -> None:
        """Refuse what cannot be started.

        Raises:
            ConfigError: naming the fix.
        """
        if shutil.which(self.program) is None:
            raise ConfigError(
                f"python={self.python!r}: there is no interpreter at {self.program}; make the "
                f"environment's own one with {self.recipe()}"
            )
        require_set(self.pass_env)

    def recipe(self) -> str:
        """The commands that make a virtual environment for it."""
        place = str(Path(self.program).parents[1])
        return (
            f"`uv venv {place} && uv pip install --compile-bytecode --python {place} "
            "'verifiers>=0.4' PACKAGE`, where PACKAGE is the environment's"
        )

    def variables(self) -> dict[str, str]:
        """All environment variables of a worker."""
        return passed_on([*_KEPT, *self.pass_env]) | NO_PROXY | dict(self.env)

    def configuration(self) -> dict[str, Any]:
        """The environment's configuration, as verifiers reads it."""
        taskset = {**self.options.get("taskset", {}), "id": self.environment}
        return {**self.options, "taskset": taskset}
