"""Python scripts, read and never run: their calls, and the values of literals and plain names."""

import ast
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_rl.errors import ConfigError

_MOST_STEPS = 100_000
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault"}
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Unread:
    """An expression that is not made of literals."""

    text: str
    line: int


@dataclass(frozen=True)
class Named:
    """An import of the script, by its path, or a function of its own as ``MODULE.name``."""

    path: str


@dataclass(frozen=True)
class Called:
    """A call; attributes that the script sets later on what it returns join its arguments."""

    what: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    receiver: Any = None
    """The object that a method is called on, or that an item is taken from."""


class PythonScript:
    """The calls of a script, and the values of its expressions.

    A name has a value if it is bound once, or several times in one function and none of them in a
    branch. What is changed in place, or is an argument, has none.

    Args:
        text: the script.
        place: its name in errors.

    Raises:
        ConfigError: if it is not Python, or too large or deep to be read.
    """

    def __init__(self, text: str, place: str) -> None:
        self.place, self.calls = place, list[ast.Call]()
        self._bound: dict[str, list[tuple[Any, Any, ast.AST | None]]] = {}
        self._set: dict[str, dict[str, Any]] = {}
        self._names: dict[int, str] = {}
        self._within: dict[int, ast.AST] = {}
        self._steps = 0
        try:
            tree = ast.parse(text)
            self._visit(tree, tree, True)
        except SyntaxError as error:
            raise ConfigError(f"{place}:{error.lineno}: not valid Python: {error.msg}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{place} cannot be read: {error or 'it is too deep'}") from error

    def _visit(self, node: ast.AST, function: ast.AST, sure: bool) -> None:
        """Note the calls and bindings of a function; ``sure``: not in a branch of it."""
        where = function if sure else None
        targets: list[ast.expr] = []
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                before = f"{module}." if module else ""
                for alias in names:
                    path = alias.name if before or alias.asname else alias.name.partition(".")[0]
                    self._bind(alias.asname or path, node, Named(before + path), where)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value, node, where)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value, node, where)
                targets = [target]
            case ast.AugAssign(target=ast.Attribute() as target, value=value):
                self._assign(target, value, node, None)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                self._bind(name, node, unread(node), None)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                self._bind(name, node, unread(node), None)
            case ast.Call(func=func):
                self.calls.append(node)
                match func:
                    case ast.Attribute(value=ast.Name(id=name), attr=attr) if attr in _CHANGES:
                        self._bind(name, node, unread(node), None)
            case ast.Name():
                self._within[id(node)] = function
        if isinstance(node, _FUNCTIONS):
            self._bind(node.name, node, Named(f"MODULE.{node.name}"), where)
            function, sure = node, True
        elif isinstance(node, _BRANCHES) and not _is_main(node):
            sure = False
        for child in ast.iter_child_nodes(node):
            if child not in targets or not isinstance(child, ast.Name | ast.Tuple):
                self._visit(child, function, sure)

    def _bind(self, name: str, node: ast.AST, value: Any, where: ast.AST | None) -> None:
        self._bound.setdefault(name, []).append((node, value, where))

    def _assign(
        self, target: ast.expr, value: ast.expr, node: ast.stmt, where: ast.AST | None
    ) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, node, value, where)
                self._names[id(value)] = name
            case ast.Tuple(elts=parts):
                values: list[ast.expr] = getattr(value, "elts", [value] * len(parts))
                # Of a model and its tokenizer the first is known, of parsed arguments all are.
                whole = isinstance(value, ast.Tuple) or "parse_" in ast.unparse(value)
                for at, (part, one) in enumerate(zip(parts, values, strict=False)):
                    self._assign(part, one, node, where if whole or at == 0 else None)
            case ast.Attribute(value=ast.Name(id=name), attr=attr):
                self._set.setdefault(name, {})[attr] = value if where else unread(target)

    def called(self, *names: str) -> list[Called]:
        """Return the calls of what is called so."""
        calls = [c for c in self.calls if ast.unparse(c.func).rpartition(".")[2] in names]
        return [self._with_set(self._names.get(id(call), ""), self.value(call)) for call in calls]

    def value(self, node: ast.expr) -> Any:
        """Return a text, number, list or mapping; or Named, Called or Unread.

        Raises:
            ConfigError: if it takes too many steps.
        """
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ConfigError(f"{self.place}: it takes more than {_MOST_STEPS:,} steps to read")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._value_of(node, name)
            case ast.Attribute(value=owner, attr=name):
                found = self.value(owner) if isinstance(owner, ast.Name | ast.Attribute) else None
                return Named(f"{found.path}.{name}") if isinstance(found, Named) else unread(node)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                return self._mapping([key and self.value(key) for key in keys], values)
            case ast.JoinedStr(values=values):
                return self._joined(node, [self.value(value) for value in values], "")
            case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
                return self.value(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.BinOp(left=left, op=op, right=right):
                return _computed(node, op, self.value(left), self.value(right))
            case ast.Subscript(value=owner, slice=index):
                found, key = self.value(owner), self.value(index)
                if isinstance(found, Called):
                    return Called("[]", [key], line=node.lineno, receiver=found)
            case ast.Call(func=func):
                return self._called(node, ast.unparse(func))
        return unread(node)

    def _value_of(self, node: ast.Name, name: str) -> Any:
        found = self._bound.get(name, [])
        function, here = self._within[id(node)], (node.lineno, node.col_offset)
        before = [
            value
            for at, value, where in found
            if where is not function or (at.end_lineno, at.end_col_offset) <= here
        ]
        sure = len(found) == 1 or all(where is function for _, _, where in found)
        if not sure or not before or any(where is None for _, _, where in found):
            return unread(node)
        value = before[-1]
        return self._with_set(name, self.value(value) if isinstance(value, ast.expr) else value)

    def _with_set(self, name: str, value: Any) -> Any:
        """Return what a name holds with the attributes that the script sets on it later."""
        if not isinstance(value, Called):
            return value
        later = self._set.pop(name, {})  # config.x = config.y may come back here
        found = {n: self.value(v) if isinstance(v, ast.expr) else v for n, v in later.items()}
        self._set[name] = later
        return replace(value, kwargs=value.kwargs | found)

    def _mapping(self, keys: Sequence[Any], nodes: Sequence[ast.expr]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, node in zip(keys, nodes, strict=True):
            value = self.value(node)
            if key is None and isinstance(value, dict):
                result |= value
            elif isinstance(key, str):
                result[key] = value
            else:
                result[f"**{unread(node).text}"] = unread(node)
        return result

    def _called(self, node: ast.Call, what: str) -> Any:
        args = [self.value(arg) for arg in node.args]
        kwargs = self._mapping([k.arg for k in node.keywords], [k.value for k in node.keywords])
        if what == "dict" and not args:
            return kwargs
        if what in ("str", "os.path.join", "Path") and args and not kwargs:
            return self._joined(node, args, os.sep)
        receiver = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        return Called(what.rpartition(".")[2], args, kwargs, node.lineno, receiver)

    def _joined(self, node: ast.expr, parts: list[Any], between: str) -> Any:
        text = between.join(map(str, parts)) if plain(parts) else ""
        return text if plain(parts) and len(text) <= 10_000 else unread(node)


def plain(value: Any) -> bool:
    """Return True if a value consists only of texts, numbers, null, lists and mappings of them."""
    if isinstance(value, list | dict):
        return all(plain(item) for item in (value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float)


def unread(node: ast.AST) -> Unread:
    """Return the expression as written in the script."""
    text = " ".join(ast.unparse(node).split())
    return Unread(text if len(text) <= 60 else f"{text[:57]}...", getattr(node, "lineno", 0))


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _computed(node: ast.expr, kind: ast.operator, left: Any, right: Any) -> Any:
    numbers = all(isinstance(v, int | float) and abs(v) < 1e15 for v in (left, right))
    if not numbers or type(kind) not in _OPERATIONS or (right == 0 and isinstance(kind, ast.Div)):
        return unread(node)
    return _OPERATIONS[type(kind)](left, right)
