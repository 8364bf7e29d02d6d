"""Plays one call, by its surface and name, where it stands."""

import os
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.hostile.call import Call


def calls_of(surface: str) -> dict[str, Call]:
    """The calls of a surface, by name."""
    calls: list[Call] = import_module(f"benchmarks.hostile.{surface}").CALLS
    by_name = {call.name: call for call in calls}
    if len(by_name) < len(calls):
        raise ValueError(f"two calls of {surface} have the same name")
    return by_name


if __name__ == "__main__":
    os.setsid()  # whatever it forks is known by its session
    sys.exit(calls_of(sys.argv[1])[sys.argv[2]].run(Path.cwd()))
