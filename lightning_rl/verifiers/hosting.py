"""Which verifiers environment is hosted, under which Python, with which settings."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_rl.errors import ConfigError
from lightning_rl.serving.variables import hosted_variables, interpreter, require_set


@dataclass(frozen=True)
class Hosting:
    """An environment and the Python that hosts it; ``options``, ``env`` as in `VerifiersAgent`."""

    environment: str
    python: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.environment:
            raise ConfigError("environment is empty; name a package that exports a taskset")
        if "id" in self.options.get("taskset", {}):
            raise ConfigError("options.taskset.id is set by `environment`; remove it")

    @property
    def key(self) -> str:
        """A key that is equal for hostings that can share workers."""
        parts = [self.environment, self.program, self.options, self.env, self.pass_env]
        return json.dumps(parts, sort_keys=True, default=str)

    @property
    def program(self) -> str:
        """The path of the interpreter."""
        return interpreter(self.python)

    def check(self) -> None:
        """Refuse a hosting that cannot be started.

        Raises:
            ConfigError: names the fix.
        """
        if shutil.which(self.program) is None:
            raise ConfigError(
                f"python={self.python!r}: there is no interpreter at {self.program}; create the "
                f"environment's own with {self.recipe()}"
            )
        require_set(self.pass_env)

    def recipe(self) -> str:
        """Return the commands that create a virtual environment for it."""
        folder = str(Path(self.program).parents[1])
        return (
            f"`uv venv {folder} && uv pip install --compile-bytecode --python {folder} "
            "'verifiers>=0.4' PACKAGE`, where PACKAGE is the environment's"
        )

    def variables(self) -> dict[str, str]:
        """Return all environment variables of a worker."""
        return hosted_variables(self.env, self.pass_env)

    def configuration(self) -> dict[str, Any]:
        """Return the environment's configuration, in verifiers' format."""
        taskset = {**self.options.get("taskset", {}), "id": self.environment}
        return {**self.options, "taskset": taskset}
