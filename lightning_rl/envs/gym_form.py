"""Forms: check observations against a gymnasium environment's declared space."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lightning_rl.envs.collector import EnvError
from lightning_rl.envs.gym import OBSERVATION, holds_bytes


def form_of(space: Any) -> Callable[[Any], Any]:
    """Return a reader of a space's observations for agents: an integer below n becomes one-hot.

    The reader raises EnvError for an observation that is not in the space.
    """
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return _Parts({name: _form(name, part) for name, part in parts.items()})
    return _form(OBSERVATION, space)


def _form(name: str, space: Any) -> Callable[[Any], Any]:
    one_of = hasattr(space, "n") and space.shape == ()
    return _OneHot(name, int(space.n), int(space.start)) if one_of else _Array(name, space)


class _Parts:
    """Several observations by name."""

    def __init__(self, forms: Mapping[str, Callable[[Any], Any]]) -> None:
        self._forms = forms

    def __call__(self, observed: Any) -> dict[str, Any]:
        if not isinstance(observed, Mapping) or not self._forms.keys() <= observed.keys():
            names = ", ".join(self._forms)
            raise EnvError(
                f"the observation is {shown(observed)}, but observation_space declares {names}"
            )
        return {name: form(observed[name]) for name, form in self._forms.items()}


class _OneHot:
    """Reads an integer below n as a one-hot row."""

    def __init__(self, name: str, n: int, start: int) -> None:
        self._name, self._n, self._start = name, n, start

    def __call__(self, observed: Any) -> np.ndarray:
        row = np.zeros(self._n, np.float32)
        try:
            index = int(observed) - self._start
        except (TypeError, ValueError):
            index = -1
        if not 0 <= index < self._n:
            raise EnvError(
                f"observation {self._name!r} is {shown(observed)}, but observation_space declares "
                f"one of {self._n} integers from {self._start} on"
            )
        row[index] = 1
        return row


class _Array:
    """Checks an array's shape; numpy would silently broadcast a wrong one."""

    def __init__(self, name: str, space: Any) -> None:
        self._name = name
        self._shape = tuple(space.shape or ())
        self._holds_bytes = holds_bytes(space)

    def __call__(self, observed: Any) -> Any:
        if getattr(observed, "shape", None) != self._shape:
            observed = self._array(observed)
        if self._holds_bytes and observed.dtype.kind == "f":
            raise EnvError(
                f"observation {self._name!r} is {observed.dtype}, but observation_space declares "
                "bytes, to which it would be rounded; cast it, or change observation_space"
            )
        return observed

    def _array(self, observed: Any) -> np.ndarray:
        """Convert an observation that is not an array of this shape yet; most are."""
        try:
            array = np.asarray(observed)
        except ValueError:  # rows of several lengths
            array = np.asarray(None)
        if array.dtype.kind not in "buif" or array.shape != self._shape:
            raise EnvError(
                f"observation {self._name!r} is {shown(observed)}, but observation_space declares "
                f"numbers of shape {self._shape}"
            )
        return array


def shown(answer: Any) -> str:
    """Format an environment's answer in one line."""
    return " ".join(f"{answer!r:.80}".split())
