"""The values of expressions in a Python script that is read and never run."""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_LONGEST = 10_000
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "len": len,
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "pathlib.Path": lambda *parts: "/".join(map(str, parts)) or ".",
    "os.path.join": lambda *parts: "/".join(map(str, parts)),
    "os.path.expanduser": str,
}
_METHODS = {"strip", "lower", "upper", "replace", "split", "join", "format", "removesuffix", "get"}


@dataclass(frozen=True)
class Unread:
    """An expression whose value only a run would reveal."""

    text: str
    line: int


@dataclass(frozen=True)
class Named:
    """An object that the script imports, or a name that it does not define."""

    path: str


@dataclass
class Called:
    """The result of calling another's code; attributes that are set later join its arguments."""

    what: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    receiver: Any = None
    """The object that a method is called on, or that an item is taken from."""

    @property
    def last(self) -> str:
        """The name after the last dot."""
        return self.what.rpartition(".")[2]


@dataclass
class Local:
    """A function of the script."""

    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Kind:
    """A class of the script, the values of its fields, and its base class."""

    node: ast.ClassDef
    fields: dict[str, Any]
    base: str


def unread(node: ast.AST) -> Unread:
    """Return the expression as written in the script."""
    text = " ".join(ast.unparse(node).split())
    return Unread(text if len(text) <= 60 else f"{text[:57]}...", getattr(node, "lineno", 0))


def plain(value: Any) -> bool:
    """Return True if a value consists only of texts, numbers, null, lists and mappings of them."""
    if isinstance(value, list | tuple):
        return all(plain(item) for item in value)
    if isinstance(value, dict):
        return all(plain(item) for item in value.values())
    return value is None or isinstance(value, str | int | float)


def same(one: Any, other: Any) -> bool:
    """Return True if two values are known to be equal."""
    return one is other or (plain(one) and plain(other) and bool(one == other))


def computed(node: ast.expr, kind: ast.AST, left: Any, right: Any) -> Any:
    """Return a sum or comparison of known values; Unread if it is neither, or could be large."""
    both = (left, right)
    text = any(isinstance(value, str | list | tuple | dict) for value in both)
    large = any(isinstance(value, int | float) and abs(value) > 1e15 for value in both)
    if isinstance(kind, ast.Div) and all(isinstance(value, str) for value in both):
        return f"{left}/{right}"  # of paths, which are texts here
    powers = isinstance(kind, ast.Pow) and not (text or 0 <= right <= 64)
    repeats = isinstance(kind, ast.Mult | ast.Mod) and text
    if type(kind) not in _OPERATIONS or not all(map(plain, both)) or large or powers or repeats:
        return unread(node)
    try:
        result = _OPERATIONS[type(kind)](left, right)
    except (TypeError, ValueError, ArithmeticError):
        return unread(node)
    too_long = isinstance(result, str | list | tuple) and len(result) > _LONGEST
    return unread(node) if too_long else result


def applied(node: ast.Call, path: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the value of a call of one of Python's functions; None for other calls."""
    if path == "dict" and not args:
        return dict(kwargs)
    if path not in _FUNCTIONS or not plain(args) or not plain(kwargs):
        return None
    return _attempt(node, lambda: _FUNCTIONS[path](*args, **kwargs))


def method(node: ast.Call, receiver: Any, name: str, args: list[Any], kwargs: Any) -> Any:
    """Return the result of a method of a known text or mapping; Unread for others."""
    if isinstance(receiver, dict) and name == "get" and args and plain(args[0]):
        return receiver.get(args[0], args[1] if len(args) > 1 else None)
    known = name in _METHODS and isinstance(receiver, str) and plain(args) and plain(kwargs)
    return _attempt(node, lambda: getattr(receiver, name)(*args)) if known else unread(node)


def _attempt(node: ast.AST, compute: Callable[[], Any]) -> Any:
    try:
        result = compute()
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        return unread(node)
    return unread(node) if isinstance(result, str) and len(result) > _LONGEST else result
