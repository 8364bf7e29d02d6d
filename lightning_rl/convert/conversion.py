"""Tables of counterparts, and the engine that uses them to read another library's configuration."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_rl.config.yaml_text import parse_yaml
from lightning_rl.convert.kinds import kind_of, read_as
from lightning_rl.errors import ConfigError

MOST_LISTED = 40
"""Maximum names listed in full: a dump of all settings holds hundreds."""


@dataclass(frozen=True)
class ParameterRow:
    """One parameter of another library.

    Args:
        theirs: its name, with dots if it is nested.
        default: its value if it is not set.
        ours: our counterparts, separated by commas: ``data.group_size`` is an argument of
            RLDataModule, ``model.x`` of PolicyModule, ``trainer.x`` of the Trainer, ``Class.x`` of
            a public class, and a single name is a public class or a top-level key. Empty: there is
            none.
        note: the meaning of a copied number here, or why there is no counterpart.
        kind: the kind of its value (see :mod:`.kinds`); empty: that of its default.
        nullable: null has a meaning, though its default is a number.
        values: the texts that convert knows, if the result depends on them.
    """

    theirs: str
    default: Any = None
    ours: str = ""
    note: str = ""
    kind: str = ""
    nullable: bool = False
    values: tuple[str, ...] = ()

    def read(self, value: Any) -> Any:
        """Convert a value to the parameter's kind; values of parameters without counterpart stay as
        is.

        Raises:
            ConfigError: if it is of another kind.
        """
        kind = self.kind or kind_of(self.default)
        if not self.ours or (value is None and not self._needs_number(kind)):
            return value
        if value is None:
            raise ConfigError(
                f"{self.theirs}=null: it takes a number; leave it out for its default, "
                f"{self.default}"
            )
        return read_as(kind, self.theirs, value)

    def _needs_number(self, kind: str) -> bool:
        numeric = kind.startswith(("integer", "number"))
        return numeric and self.default is not None and not self.nullable


def sections(library: str) -> dict[str, list[ParameterRow]]:
    """Read the table of ``trl``, ``verl`` or ``prime_rl``: its rows by heading."""
    text = Path(__file__).with_name(f"{library}.yaml").read_text(encoding="utf-8")
    return {
        title: [ParameterRow(theirs, **(columns or {})) for theirs, columns in rows.items()]
        for title, rows in parse_yaml(text, library).items()
    }


def table(library: str) -> dict[str, ParameterRow]:
    """Read all rows of a library's table, by their names there."""
    return {row.theirs: row for rows in sections(library).values() for row in rows}


@dataclass(frozen=True)
class Left:
    """A value that was not carried over, and why; ``default`` if it is theirs anyway."""

    key: str
    value: Any
    reason: str
    default: bool = False


@dataclass
class Conversion:
    """Our configuration as it is built, and the notes about it."""

    config: dict[str, Any] = field(
        default_factory=lambda: {
            "model": {"class_path": "PolicyModule", "init_args": {}},
            "data": {"class_path": "RLDataModule", "init_args": {}},
        }
    )
    left: list[Left] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Values that carry over under another number or name."""
    missing: list[str] = field(default_factory=list)
    """Settings to fill in, which the other library does not keep in its configuration."""

    def put(self, path: str, value: Any) -> None:
        """Set ``model.x``, ``data.x`` or ``trainer.x``; further dots go deeper."""
        first, *rest = path.split(".")
        names = [first, *(["init_args"] if first in ("model", "data") else []), *rest]
        at = self.config
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = value

    def put_class(self, path: str, name: str, /, **arguments: Any) -> None:
        """Set a class with its arguments."""
        self.put(path, instance(name, **arguments))

    def carry(self, given: "Given", names: Mapping[str, str]) -> None:
        """Copy each key of ``names`` that is on or set to our name for it, its value."""
        for theirs, ours in names.items():
            if given[theirs]:
                self.put(ours, given[theirs])

    def put_model(self, path: str | None) -> None:
        """Set the model, or list it as missing."""
        if path is None:
            self.missing.append("model.model: directory or hub name of the model")
        self.put("model.model", path or "MODEL")

    def put_lora(self, rank: int, alpha: float, targets: str | Iterable[str]) -> None:
        """Set adapters for these layers; a text is a pattern, except ``all-linear``."""
        names = targets if isinstance(targets, str) else list(targets)
        names = ["all-linear"] if names == "all-linear" else names
        self.put("model.lora", {"rank": rank, "alpha": float(alpha), "target_modules": names})

    def put_loggers(
        self, given: "Given", key: str, loggers: Mapping[str, Any], ignored: set[str]
    ) -> None:
        """Set the known loggers that the value names; note any other that is not in ``ignored``."""
        names = as_list(given[key])
        if chosen := [loggers[name] for name in names if name in loggers]:
            self.put("trainer.logger", chosen)
        if set(names) - loggers.keys() - ignored:
            self.leave(given, key, "write one of Lightning's loggers")

    def choose(self, given: "Given", key: str) -> Any:
        """Return which known text a value is; for any other, note it and return the default."""
        row = given.row(key)
        value = given[key]
        if value is None:
            return row.default
        if value in row.values:
            return value
        self.leave(given, key, f"it is not one of {', '.join(row.values)}; {row.default} is used")
        return row.default

    def leave(self, given: "Given", key: str, reason: str = "") -> None:
        """Note that a value is not carried over, or not unchanged; the table's note says why."""
        self.left.append(Left(key, given[key], reason or given.row(key).note))

    def idle(self, given: "Given", names: Iterable[str], beside: str) -> None:
        """Note which of these the file sets, though they have no effect there beside this."""
        given_names = [name for name in names if given.says(name)]
        given.cover(*given_names)
        if given_names:
            self.remarks.append(
                f"{', '.join(given_names)}: of no effect, there and here, with {beside}"
            )

    def leave_rest(self, given: "Given") -> None:
        """Note all values that nothing has asked for; many defaults, as of a dump, in one line."""
        rest = given.left()
        defaults = [item.key for item in rest if item.default]
        if len(defaults) > MOST_LISTED:
            rest = [item for item in rest if not item.default]
            self.remarks.append(f"written as by default, and left out: {', '.join(defaults)}")
        self.left += rest


def instance(name: str, /, **arguments: Any) -> dict[str, Any]:
    """Return a class and its arguments, in our YAML's form."""
    return {"class_path": name, **({"init_args": arguments} if arguments else {})}


def as_list(value: str | Iterable[str] | None) -> list[str]:
    """Return a single name, several, or none as a list."""
    return [value] if isinstance(value, str) else list(value or [])


def prompts_from(path: str, split: str | None, **options: Any) -> dict[str, Any]:
    """Return the class that reads a file or folder of prompts."""
    if os.path.isdir(path):
        return instance("HFDatasetPrompts", path=path, split=split, **options)
    kind = "ParquetPrompts" if Path(path).suffix == ".parquet" else "JSONLPrompts"
    return instance(kind, path=path, **options)


class Given:
    """The values of a configuration, with defaults; tracks which of them were carried over.

    Args:
        values: the values of the file.
        rows: the table.
        defaults: defaults of parameters that are in no row.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        rows: Mapping[str, ParameterRow],
        defaults: Mapping[str, Any],
    ) -> None:
        known = {name: row.default for name, row in rows.items()}
        values = {
            name: rows[name].read(value) if name in rows else value
            for name, value in values.items()
        }
        self._values = known | values
        self._defaults = {**defaults, **known}
        self._rows = rows
        self._given = values
        self._taken: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """Return a value and mark it as carried over."""
        self._taken.add(name)
        return self._values[name]

    def look(self, name: str) -> Any:
        """Return a value without marking it as carried over."""
        return self._values[name]

    def row(self, name: str) -> ParameterRow:
        """Return a parameter's row in the table."""
        return self._rows[name]

    def says(self, name: str) -> bool:
        """Return True if the file sets this parameter."""
        return name in self._given

    def has(self, section: str) -> bool:
        """Return True if the file has this section, be it an empty one; null is none."""
        named = (name for name, value in self._given.items() if value is not None)
        return any(f"{name}.".startswith(f"{section}.") for name in named)

    def cover(self, *names: str) -> None:
        """Mark parameters as carried over that hold here anyway, or come with another."""
        self._taken.update(names)

    def left(self) -> list[Left]:
        """List values that were given and not carried over, be they the defaults."""
        return [
            Left(name, value, self._reason(name), _same(value, self._defaults.get(name)))
            for name, value in self._given.items()
            if name not in self._taken and not _unset(value, self._defaults.get(name))
        ]

    def _reason(self, name: str) -> str:
        parts = name.split(".")
        above = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        if name not in self._rows:
            # A section may have a row of its own, if nothing in it has a counterpart.
            name = next((a for a in above if a in self._rows and not self._rows[a].ours), name)
        if name in self._rows:
            row = self._rows[name]
            unused = "nothing that is enabled uses it" if row.ours else "it has no counterpart"
            return row.note or unused
        return (
            "it is in no table of counterparts: look it up on the page that compares both libraries"
        )


def _same(value: Any, default: Any) -> bool:
    """Return True if a value is the default."""
    return value == default or (not value and not default and value != 0)


def _unset(value: Any, default: Any) -> bool:
    """Return True if a value is null as by default; dumps hide tokens as ``<NAME>``."""
    if isinstance(value, str) and re.fullmatch(r"<[A-Z_]+_TOKEN>", value):
        return True
    return value is None and default is None
