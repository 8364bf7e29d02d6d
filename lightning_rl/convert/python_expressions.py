"""The values of a Python script's expressions, as far as they are known without running it."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning_rl.convert.python_values import (
    Called,
    Kind,
    Local,
    Named,
    Unread,
    applied,
    computed,
    method,
    plain,
    unread,
)
from lightning_rl.errors import ConfigError

_MOST_STEPS = 100_000
_PARSED = ("parse_args", "parse_known_args")
_INTO_CLASSES = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_yaml_file")


class Expressions(ABC):
    """Evaluates expressions with the variables of the functions that are being read.

    Args:
        place: the script's name in errors.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.calls: list[Called] = []
        """Calls of objects that the script does not define, in the order in which it makes them."""
        self.defaults: dict[str, Any] = {}
        """Script arguments and environment variables that were read as their defaults."""
        self._scopes: list[dict[str, Any]] = [{"__name__": "__main__"}]
        self._arguments: dict[int, dict[str, Any]] = {}
        self._steps = 0

    @abstractmethod
    def _enter(self, function: Local, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Read a function of the script with these arguments; return what it returns."""

    def _truth(self, value: Any) -> bool | None:
        return bool(value) if plain(value) else None

    def _value(self, node: ast.expr) -> Any:
        self._count()
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                found = self._scopes[-1].get(name, self._scopes[0].get(name, Named(name)))
                return found if name != "__file__" else unread(node)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(node, self._value(owner), name)
            case ast.Call():
                return self._call(node)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                found = [part for item in items for part in self._items(item)]
                return tuple(found) if isinstance(node, ast.Tuple) else found
            case ast.Dict(keys=keys, values=values):
                return self._mapping(keys, values)
            case ast.JoinedStr(values=values):
                parts = [self._value(value) for value in values]
                return "".join(map(str, parts)) if plain(parts) else unread(node)
            case ast.FormattedValue(value=value, format_spec=None):
                return self._value(value)
            case ast.Subscript(value=owner, slice=index):
                return self._item(node, self._value(owner), self._value(index))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                said = self._truth(self._value(test))
                return unread(node) if said is None else self._value(body if said else orelse)
            case ast.BoolOp(op=op, values=values):
                return self._either(node, isinstance(op, ast.Or), values)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                said = self._truth(self._value(operand))
                return unread(node) if said is None else not said
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return computed(node, ast.Sub(), 0, self._value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return computed(node, op, self._value(left), self._value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return computed(node, op, self._value(left), self._value(right))
        return unread(node)

    def _items(self, node: ast.expr) -> list[Any]:
        if not isinstance(node, ast.Starred):
            return [self._value(node)]
        found = self._value(node.value)
        return list(found) if isinstance(found, list | tuple) else [unread(node)]

    def _mapping(self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(keys, values, strict=True):
            inner, name = self._value(value), None if key is None else self._value(key)
            if key is None and isinstance(inner, dict):
                found |= inner
            elif key is None:
                found[f"**{unread(value).text}"] = unread(value)
            elif isinstance(name, str | int | float):
                found[name] = inner
        return found

    def _either(self, node: ast.expr, stops_at: bool, values: Sequence[ast.expr]) -> Any:
        found: Any = None
        for value in values:
            found = self._value(value)
            said = self._truth(found)
            if said is None:
                return unread(node)
            if said is stops_at:
                return found
        return found

    def _attribute(self, node: ast.Attribute, owner: Any, name: str) -> Any:
        if isinstance(owner, Named):
            return Named(f"{owner.path}.{name}")
        fields = {Called: "kwargs", Kind: "fields"}.get(type(owner))
        known = getattr(owner, fields) if fields else {}
        if isinstance(owner, Called) and owner.what == "arguments" and name in known:
            self.defaults[name] = known[name]
        return known.get(name, unread(node))

    def _item(self, node: ast.Subscript, owner: Any, key: Any) -> Any:
        if isinstance(owner, Called):
            return Called("[]", [key], line=node.lineno, receiver=owner)
        try:
            return owner[key] if isinstance(owner, list | tuple | dict | str) else unread(node)
        except (LookupError, TypeError):
            return unread(node)

    def _call(self, node: ast.Call) -> Any:
        args = [part for arg in node.args for part in self._items(arg)]
        kwargs = self._keywords(node)
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value)
            if not isinstance(owner, Named):
                return self._method(node, owner, node.func.attr, args, kwargs)
        function = self._value(node.func)
        if isinstance(function, Local):
            return self._enter(function, args, kwargs)
        if isinstance(function, Kind):
            given = dict(zip(function.fields, args, strict=False)) | kwargs
            return self._note(Called(function.base, [], function.fields | given, node.lineno))
        path = function.path if isinstance(function, Named) else unread(node.func).text
        if path in ("os.getenv", "os.environ.get") and len(args) == 2:
            self.defaults[f"${args[0]}"] = args[1]
            return args[1]
        found = applied(node, path, args, kwargs)
        return self._note(Called(path, args, kwargs, node.lineno)) if found is None else found

    def _keywords(self, node: ast.Call) -> dict[str, Any]:
        keys = [None if k.arg is None else ast.Constant(k.arg) for k in node.keywords]
        found: dict[str, Any] = self._mapping(keys, [k.value for k in node.keywords])
        return found

    def _method(
        self, node: ast.Call, owner: Any, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        if not isinstance(owner, Called):
            return method(node, owner, name, args, kwargs)
        parser = owner.receiver if owner.last.startswith("add_") else owner
        if name == "add_argument":
            self._arguments.setdefault(id(parser), {}).update(_argument(node, args, kwargs))
        elif name in _PARSED:
            found = Called("arguments", [], dict(self._arguments.get(id(owner), {})), node.lineno)
            return (found, unread(node)) if name == "parse_known_args" else found
        elif name in _INTO_CLASSES and owner.args:
            kinds = owner.args[0] if isinstance(owner.args[0], list | tuple) else [owner.args[0]]
            return tuple(self._parsed(kind, owner, node.lineno) for kind in kinds)
        what = f"{owner.what}.{name}"
        return self._note(Called(what, args, kwargs, node.lineno, parser))

    def _parsed(self, kind: Any, parser: Called, line: int) -> Any:
        """Return the object that a parser fills from the command line, with known defaults."""
        path = {Kind: "base", Named: "path"}.get(type(kind))
        if path is None:
            return kind
        return self._note(
            Called(getattr(kind, path), [], dict(getattr(kind, "fields", {})), line, parser)
        )

    def _note(self, call: Called) -> Called:
        self.calls.append(call)
        return call

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ConfigError(f"{self.place}: it takes more than {_MOST_STEPS:,} steps to read")


def _argument(node: ast.Call, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the name and default of an argument added to argparse."""
    flags = [arg for arg in args if isinstance(arg, str)]
    if not flags:
        return {}
    long = next((flag for flag in flags if flag.startswith("--")), flags[0])
    action = kwargs.get("action")
    default: Any = {"store_true": False, "store_false": True}.get(str(action))
    if kwargs.get("required") or not flags[0].startswith("-"):
        default = Unread(f"the script's argument {long}", node.lineno)
    name = kwargs.get("dest", long.lstrip("-").replace("-", "_"))
    return {name: kwargs.get("default", default)}
