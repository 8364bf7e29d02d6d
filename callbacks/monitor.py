"""A metric that is looked at by its name: refused once it is known that nobody records it."""

from collections.abc import Iterable
from difflib import get_close_matches

from lightning_rl.errors import ConfigError


class Monitor:
    """Looks for a metric in the rows of a run, until it is there.

    What an evaluation records is known after the first one, everything else after the first
    iteration that made an update. A callback that has a value of its own only later records nan
    until then.

    Args:
        name: of the metric.
        whose: who asked for it, for the message.
    """

    def __init__(self, name: str, whose: str) -> None:
        self.name = name
        self.whose = whose
        self._seen: set[str] = set()

    def look(self, row: Iterable[str], evaluates: bool) -> None:
        """Go through the names of a row; ``evaluates``: the run has an ``Evaluate``.

        Raises:
            ConfigError: if the metric should have been there by now, naming those that are.
        """
        names = set(row)
        self._seen |= names
        kind = self.name.split("/")[0] + "/"
        alike = sorted(name for name in self._seen if name.startswith(kind))
        complete = bool(alike) if kind == "eval/" and evaluates else "policy/loss" in names
        if self.name in self._seen or not complete:
            return
        close = get_close_matches(self.name, self._seen, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{self.whose}(monitor={self.name!r}): no such metric was recorded; {hint}There are "
            f"{', '.join(alike or sorted(self._seen))}. A callback that records it later has to "
            "record nan until then"
        )
