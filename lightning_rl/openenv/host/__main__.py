"""Serves an OpenEnv environment: `python DIRECTORY MODULE:NAME PORT SESSIONS`.

It runs under the environment's own interpreter, so it imports OpenEnv and the standard library, and
nothing of lightning_rl. The name is that of an Environment class, or of an app that serves one.
"""

import importlib
import inspect
import os
import sys
import typing
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment


def app_of(kind: Any, sessions: int) -> Any:
    """Return the app that serves an Environment class."""
    if sessions > 1 and not kind.SUPPORTS_CONCURRENT_SESSIONS:
        sys.exit(f"{kind.__name__}.SUPPORTS_CONCURRENT_SESSIONS is False: set sessions to 1")
    hints = typing.get_type_hints(kind.step)
    kinds = hints.get("action"), hints.get("return")
    if not all(map(inspect.isclass, kinds)):
        sys.exit(f"{kind.__name__}.step needs type hints: its action's class, and its result's")
    return create_app(kind, *kinds, max_concurrent_envs=sessions)


def main() -> None:
    path, port, sessions = sys.argv[1:]
    sys.path[0] = os.getcwd()  # in place of this folder
    module, _, name = path.partition(":")
    app = getattr(importlib.import_module(module), name)
    if inspect.isclass(app) and issubclass(app, Environment):
        app = app_of(app, int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
