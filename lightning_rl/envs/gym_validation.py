"""Forms: check observations against a gymnasium environment's declared space."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from lightning_rl.envs.collector import EnvError
from lightning_rl.envs.gym import OBSERVATION, holds_bytes


def form_of(space: Any) -> Callable[[Any], Any]:
    """Return a reader of a space's observations for agents: an integer below n becomes one-hot.

    The reader raises EnvError for an observation that is not in the space.
    """
    parts = getattr(space, "spaces", None)
    if not isinstance(parts, Mapping):
        return _form(OBSERVATION, space)
    forms = {name: _form(name, part) for name, part in parts.items()}

    def read(observed: Any) -> dict[str, Any]:
        if not isinstance(observed, Mapping) or not forms.keys() <= observed.keys():
            names = ", ".join(forms)
            raise EnvError(
                f"the observation is {shown(observed)}, but observation_space declares {names}"
            )
        return {name: form(observed[name]) for name, form in forms.items()}

    return read


def _form(name: str, space: Any) -> Callable[[Any], Any]:
    if hasattr(space, "n") and space.shape == ():
        return partial(_one_hot, name, int(space.n), int(space.start))
    return partial(_array, name, tuple(space.shape or ()), holds_bytes(space))


def _one_hot(name: str, n: int, start: int, observed: Any) -> np.ndarray:
    """Read an integer below n as a one-hot row."""
    row = np.zeros(n, np.float32)
    try:
        index = int(observed) - start
    except (TypeError, ValueError):
        index = -1
    if not 0 <= index < n:
        raise EnvError(
            f"observation {name!r} is {shown(observed)}, but observation_space declares one of "
            f"{n} integers from {start} on"
        )
    row[index] = 1
    return row


def _array(name: str, shape: tuple[int, ...], of_bytes: bool, observed: Any) -> Any:
    """Check an array's shape; numpy would silently broadcast a wrong one."""
    array = observed
    if getattr(observed, "shape", None) != shape:  # most have it already
        try:
            array = np.asarray(observed)
        except ValueError:  # rows of several lengths
            array = np.asarray(None)
        if array.dtype.kind not in "buif" or array.shape != shape:
            raise EnvError(
                f"observation {name!r} is {shown(observed)}, but observation_space declares "
                f"numbers of shape {shape}"
            )
    if of_bytes and array.dtype.kind == "f":
        raise EnvError(
            f"observation {name!r} is {array.dtype}, but observation_space declares bytes, to "
            "which it would be rounded; cast it, or change observation_space"
        )
    return array


def shown(answer: Any) -> str:
    """Format an environment's answer in one line."""
    return " ".join(f"{answer!r:.80}".split())
