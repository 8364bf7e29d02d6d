"""OpenEnvServer: which server of an OpenEnv environment is played, and how it is read."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, EpisodeError, require_at_least
from lightning_rl.rollout import Message
from lightning_rl.serving.variables import hosted_variables, interpreter, require_set

_HOST = str(Path(__file__).with_name("host"))
_PORT = "{port}"
"""Stands in a command for the port to serve on."""


@configurable
class OpenEnvServer:
    """The server of an environment for OpenEnv, and how its actions and observations are read.

    It runs at an ``address``, or is started here by a ``command`` or for an ``environment``. A
    server that is started here is shared by all that name it with equal arguments, starts again
    when it has ended, and ends with this process.

    Args:
        address: a running server: ``http://host:port``, or ``https://`` of a Space.
        command: a program that serves on this machine, with its arguments; ``{port}`` in them
            becomes the port, such as in ``[uvicorn, my_env.server.app:app, --port, "{port}"]``.
        environment: ``package.module:Name`` of an ``Environment`` class, or of an app made by
            ``create_app``, to be served by a process of ``python``.
        python: the interpreter that the environment is installed for, or the directory of its
            virtual environment; needed with ``environment``.
        action_field: the field of an action that holds the model's turn; None: the only one.
        observation_field: the field of an observation that the model reads: a text, or chat
            messages. None: the only text among its fields, else all of them as JSON.
        reward_fields: fields of an observation, or of its metadata, with numbers that are parts of
            the reward: each is summed over the steps, and logged under its name.
        env: environment variables to set for a started server.
        pass_env: names of variables to pass on to it from the trainer's environment; of the others
            it gets only those that name paths.
        sessions: maximum number of episodes that a training process plays at the same time; further
            ones wait.
        start_seconds: time limit, in seconds, for a started server to answer. Importing OpenEnv
            alone takes three seconds of CPU, and a minute on a busy machine.
        answer_seconds: time limit of each answer.

    Raises:
        ConfigError: for values out of range, unless there is exactly one of ``address``,
            ``command`` and ``environment``.
    """

    def __init__(
        self,
        address: str | None = None,
        command: list[str] | None = None,
        environment: str | None = None,
        python: str | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
        reward_fields: list[str] | None = None,
        env: dict[str, str] | None = None,
        pass_env: list[str] | None = None,
        sessions: int = 64,
        start_seconds: float = 300.0,
        answer_seconds: float = 60.0,
    ) -> None:
        require_at_least(1, sessions=sessions)
        require_at_least(0.001, start_seconds=start_seconds, answer_seconds=answer_seconds)
        if sum(map(bool, (address, command, environment))) != 1:
            raise ConfigError(
                f"OpenEnvServer(address={address!r}, command={command}, "
                f"environment={environment!r}) needs exactly one of the three"
            )
        if bool(environment) != bool(python):
            raise ConfigError("environment and python go together: python is what serves it")
        if environment and not all(environment.partition(":")):
            raise ConfigError(f"environment={environment!r} must be package.module:Name")
        if command and not any(_PORT in word for word in command):
            raise ConfigError(f"command={command} must have {_PORT} where the port belongs")
        if address and not address.startswith(("http://", "https://")):
            raise ConfigError(f"address={address!r} must begin with http:// or https://")
        self.address = address and address.rstrip("/")
        self.command = command
        self.environment = environment
        self.python = python
        self.action_field = action_field
        self.observation_field = observation_field
        self.reward_fields = reward_fields or []
        self.env = env or {}
        self.pass_env = pass_env or []
        self.sessions = sessions
        self.start_seconds = start_seconds
        self.answer_seconds = answer_seconds

    def __repr__(self) -> str:
        served = self.address or self.environment or " ".join(self.command or [])
        return f"OpenEnvServer({served!r})"

    @property
    def key(self) -> str:
        """A key that is equal for those that share a server."""
        parts = [self.address, self.command, self.environment, self.python]
        return json.dumps([*parts, self.env, self.pass_env, self.sessions], sort_keys=True)

    def check(self) -> None:
        """Refuse a server that cannot be started.

        Raises:
            ConfigError: names the fix.
        """
        program = self.command_line(0)[0]
        if shutil.which(program) is None:
            made = f"`uv venv {self.python} && uv pip install --python {self.python} PACKAGE`"
            fix = f"create its environment with {made}" if self.python else "install it"
            raise ConfigError(f"{self!r}: there is no program {program}; {fix}")
        require_set(self.pass_env)

    def command_line(self, port: int) -> list[str]:
        """Return the command that serves at a port of this machine."""
        if self.python is not None and self.environment is not None:
            served = [self.environment, str(port), str(self.sessions)]
            return [interpreter(self.python), _HOST, *served]
        return [word.replace(_PORT, str(port)) for word in self.command or ()]

    def variables(self) -> dict[str, str]:
        """Return all environment variables of a started server."""
        return hosted_variables(self.env, self.pass_env)

    def field_of_action(self, schema: Mapping[str, Any]) -> str:
        """Return the field of an action that holds the model's turn, by the action's JSON schema.

        Raises:
            ConfigError: if ``action_field`` is not one, or has to be chosen.
        """
        fields = [name for name in schema.get("properties", {}) if name != "metadata"]
        named = fields if self.action_field is None else [self.action_field]
        if len(named) == 1 and named[0] in fields:
            return named[0]
        raise ConfigError(
            f"{self!r}: action_field={self.action_field!r} must name the field of an action that "
            f"holds the model's turn; its actions have {', '.join(fields) or 'no fields'}"
        )

    def shown(self, fields: Mapping[str, Any]) -> str | list[Message]:
        """Return what the model reads of an observation.

        Raises:
            EpisodeError: if it lacks ``observation_field``.
        """
        texts = [value for value in fields.values() if isinstance(value, str)]
        if self.observation_field is not None:
            seen = _field(fields, self.observation_field)
        else:
            seen = texts[0] if len(texts) == 1 else fields
        if isinstance(seen, str) or _are_messages(seen):
            return seen
        return json.dumps(seen, ensure_ascii=False)

    def reward_parts(self, fields: Mapping[str, Any]) -> dict[str, float]:
        """Return the parts of a step's reward by name; null counts as 0.

        Raises:
            EpisodeError: if an observation lacks one of ``reward_fields``, or it is no number.
        """
        found = {name: _field(fields, name) for name in self.reward_fields}
        for name, value in found.items():
            if not isinstance(value, bool | int | float | None):
                raise EpisodeError(f"reward_fields: {name}={value!r:.80} is no number")
        return {name: float(value or 0) for name, value in found.items()}


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise EpisodeError(f"an observation has no field {name!r}; it has {', '.join(fields)}")
    return fields[name]


def _are_messages(seen: Any) -> bool:
    parts = seen if isinstance(seen, list) and seen else [None]
    return all(isinstance(part, dict) and {"role", "content"} <= part.keys() for part in parts)
