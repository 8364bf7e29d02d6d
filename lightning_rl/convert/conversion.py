"""Tables of counterparts, and the engine that reads another library's configuration by them."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_rl.config.yaml_text import parse_yaml
from lightning_rl.convert.kinds import kind_of, read_as
from lightning_rl.errors import ConfigError


@dataclass(frozen=True)
class ParameterRow:
    """One parameter of another library.

    Args:
        theirs: its name; of nested ones with dots.
        default: its value where nothing is said.
        ours: our counterparts, separated by commas: ``data.group_size`` is an argument of
            RLDataModule, ``model.x`` of PolicyModule, ``trainer.x`` of the Trainer, ``Class.x`` of
            a public class, and a name alone a public class or a top-level key. Empty: there is
            none.
        note: what a copied number means here, or why there is no counterpart.
        kind: what it takes (see :mod:`.kinds`); empty: what its default is.
        nullable: null means something, though its default is a number.
        values: the texts that convert knows, where it depends on them what is written.
    """

    theirs: str
    default: Any = None
    ours: str = ""
    note: str = ""
    kind: str = ""
    nullable: bool = False
    values: tuple[str, ...] = ()

    def read(self, value: Any) -> Any:
        """A value as the kind that it takes; one that nothing is made of, as it is.

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
    """Read the table of ``trl`` or ``verl``: the rows by their heading."""
    text = Path(__file__).with_name(f"{library}.yaml").read_text(encoding="utf-8")
    return {
        title: [ParameterRow(theirs, **(columns or {})) for theirs, columns in rows.items()]
        for title, rows in parse_yaml(text, library).items()
    }


def table(library: str) -> dict[str, ParameterRow]:
    """Read all rows of ``trl`` or ``verl``, by its own names."""
    return {row.theirs: row for rows in sections(library).values() for row in rows}


@dataclass(frozen=True)
class Left:
    """A value that was not carried over, and why."""

    key: str
    value: Any
    reason: str


@dataclass
class Conversion:
    """Our configuration as it comes together, and what is to be said about it."""

    config: dict[str, Any] = field(
        default_factory=lambda: {
            "model": {"class_path": "PolicyModule", "init_args": {}},
            "data": {"class_path": "RLDataModule", "init_args": {}},
        }
    )
    left: list[Left] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What carries over under another number or name."""
    missing: list[str] = field(default_factory=list)
    """What the other library does not keep in its configuration, to be filled in."""

    def put(self, path: str, value: Any) -> None:
        """Set ``model.x``, ``data.x`` or ``trainer.x``; dots go deeper."""
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
        """Set ours, the values of ``names``, to theirs, the keys, where those are on or set."""
        for theirs, ours in names.items():
            if given[theirs]:
                self.put(ours, given[theirs])

    def put_model(self, path: str | None) -> None:
        """Set the model, or ask for it."""
        if path is None:
            self.missing.append("model.model: directory or hub name of the model")
        self.put("model.model", path or "MODEL")

    def put_lora(self, rank: int, alpha: float, targets: str | Iterable[str]) -> None:
        """Set adapters of these layers; a text is a pattern, but for ``all-linear``."""
        names = targets if isinstance(targets, str) else list(targets)
        names = ["all-linear"] if names == "all-linear" else names
        self.put("model.lora", {"rank": rank, "alpha": float(alpha), "target_modules": names})

    def put_loggers(
        self, given: "Given", key: str, loggers: Mapping[str, Any], ignored: set[str]
    ) -> None:
        """Set those of ``loggers`` that the value names; of any other but ``ignored``, say so."""
        names = as_list(given[key])
        if chosen := [loggers[name] for name in names if name in loggers]:
            self.put("trainer.logger", chosen)
        if set(names) - loggers.keys() - ignored:
            self.leave(given, key, "write one of Lightning's loggers")

    def choose(self, given: "Given", key: str) -> Any:
        """Look up which of the texts that convert knows a value is; any other is its default."""
        row = given.row(key)
        value = given[key]
        if value is None:
            return row.default
        if value in row.values:
            return value
        self.leave(given, key, f"it is none of {', '.join(row.values)}; {row.default} is carried")
        return row.default

    def leave(self, given: "Given", key: str, reason: str) -> None:
        """Note that a value is not carried over, or not as it is."""
        self.left.append(Left(key, given[key], reason))


def instance(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A class and its arguments, as our YAML has them."""
    return {"class_path": name, **({"init_args": arguments} if arguments else {})}


def as_list(value: str | Iterable[str] | None) -> list[str]:
    """A name alone, or names, or none, as a list."""
    return [value] if isinstance(value, str) else list(value or [])


def prompts_from(path: str, split: str | None, **options: Any) -> dict[str, Any]:
    """The class that reads a file or folder of prompts."""
    if os.path.isdir(path):
        return instance("HFDatasetPrompts", path=path, split=split, **options)
    kind = "ParquetPrompts" if Path(path).suffix == ".parquet" else "JSONLPrompts"
    return instance(kind, path=path, **options)


class Given:
    """The values of a configuration, defaults filled in; knows what was taken over.

    Args:
        values: what the file says.
        rows: the table.
        defaults: of parameters that are in no row.
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
        """A value that is carried over."""
        self._taken.add(name)
        return self._values[name]

    def look(self, name: str) -> Any:
        """A value that is not carried over by this."""
        return self._values[name]

    def row(self, name: str) -> ParameterRow:
        """Look a parameter up in the table."""
        return self._rows[name]

    def says(self, name: str) -> bool:
        """Tell whether the file says something of it."""
        return name in self._given

    def cover(self, *names: str) -> None:
        """These hold here anyway, or come with another."""
        self._taken.update(names)

    def left(self) -> list[Left]:
        """List what was given, says something else than the default, and was not taken over."""
        return [
            Left(name, value, self._reason(name))
            for name, value in self._given.items()
            if name not in self._taken and not _same(value, self._defaults.get(name))
        ]

    def _reason(self, name: str) -> str:
        if name in self._rows:
            row = self._rows[name]
            unused = "nothing that is on uses it" if row.ours else "it has no counterpart"
            return row.note or unused
        return "it is in no table of counterparts: look for it on the page that compares both"


def _same(value: Any, default: Any) -> bool:
    """Tell whether it is what holds anyway; dumps hide tokens as ``<NAME>``."""
    if value is None or (isinstance(value, str) and re.fullmatch(r"<[A-Z_]+_TOKEN>", value)):
        return True
    return value == default or (not value and not default and value != 0)
