"""Python scripts, read and never run: their calls, with the values of their arguments."""

import ast
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from lightning_rl.convert.python_expressions import Expressions
from lightning_rl.convert.python_values import (
    Called,
    Kind,
    Local,
    Named,
    Unread,
    same,
    unread,
)
from lightning_rl.errors import ConfigError

_DEEPEST = 30
_RESULT = "return"
"""Stands among the variables of a function that may have returned earlier; no variable is called
so.
"""


class _Returned(Exception):
    """Raised when a function of the script returns."""

    def __init__(self, value: Any) -> None:
        self.value = value


class PythonScript(Expressions):
    """Follows a script from its first line, as far as its values are known.

    Functions are entered where they are called. For ``if``, the branch that the values select is
    read; values that differ between branches which only a run would decide, and values that a loop
    changes, count as unread. Script arguments have their defaults.

    Args:
        text: the script.
        place: its name in errors.
        wanted: names of classes. If none of them is called, functions that nobody calls are
            entered.

    Raises:
        ConfigError: if it is not Python, or too large or deep to be read.
    """

    def __init__(self, text: str, place: str, wanted: Sequence[str]) -> None:
        super().__init__(place)
        self._entered: set[int] = set()
        self._unsure = 0
        try:
            tree = ast.parse(text)
            self._run(tree.body)
            if not any(call.last in wanted for call in self.calls):
                self._enter_all(tree)
        except SyntaxError as error:
            raise ConfigError(f"{place}:{error.lineno}: not valid Python: {error.msg}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{place} cannot be read: {error or 'it is nested too deeply'}"
            ) from error

    def _run(self, statements: Iterable[ast.stmt]) -> bool:
        """Read statements up to a return; return True if there was one."""
        try:
            self._all(statements)
        except _Returned:
            return True
        return False

    def _enter_all(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                this = Called(node.name, line=node.lineno)
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                for entered in sorted(methods, key=lambda n: n.name != "__init__"):
                    self._enter(Local(entered), [this], {})
            elif _is_function(node) and id(node) not in self._entered:
                self._enter(Local(node), [], {})

    def _statement(self, node: ast.stmt) -> None:
        self._count()
        match node:
            case ast.Import(names=names):
                for name in names:
                    bound = name.asname or name.name.partition(".")[0]
                    self._scopes[-1][bound] = Named(name.name if name.asname else bound)
            case ast.ImportFrom(module=module, names=names):
                for name in names:
                    path = f"{module}.{name.name}" if module else name.name
                    self._scopes[-1][name.asname or name.name] = Named(path)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._scopes[-1][name] = Local(node)
            case ast.ClassDef(name=name):
                self._scopes[-1][name] = self._kind(node)
            case ast.Assign(targets=targets, value=value):
                found = self._value(value)
                for target in targets:
                    self._assign(target, found)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                changed = ast.BinOp(target, op, value)
                self._assign(target, self._value(ast.copy_location(changed, node)))
            case ast.Expr(value=value):
                self._value(value)
            case ast.Raise(exc=ast.expr() as value):  # SystemExit(main())
                self._value(value)
            case ast.Return(value=value):
                raise _Returned(None if value is None else self._value(value))
            case ast.If(test=test, body=body, orelse=orelse):
                said = self._truth(self._value(test))
                if said is None:
                    self._undecided(unread(test), body, orelse)
                else:
                    self._all(body if said else orelse)
            case ast.For(body=body) | ast.AsyncFor(body=body) | ast.While(body=body):
                if isinstance(node, ast.For | ast.AsyncFor):
                    self._assign(node.target, unread(node.target))
                self._undecided(Unread("a loop", node.lineno), body, [])
            case ast.Try(body=body, orelse=orelse, finalbody=finalbody):
                self._all([*body, *orelse, *finalbody])
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    found = self._value(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, found)
                self._all(body)

    def _all(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _undecided(self, what: Unread, *arms: list[ast.stmt]) -> None:
        """Read all arms; the values on which they agree count."""
        before, ends = self._scopes[-1], []
        self._unsure += 1
        for arm in arms:
            self._scopes[-1] = dict(before)
            if self._run(arm):
                before[_RESULT] = what
            else:
                ends.append(self._scopes[-1])
        self._unsure -= 1
        self._scopes[-1] = before
        for name in sorted({name for end in ends for name in end}):
            found = [end.get(name, what) for end in ends]
            agree = all(same(found[0], other) for other in found)
            before[name] = found[0] if agree else Unread(f"{name}, by {what.text}", what.line)

    def _kind(self, node: ast.ClassDef) -> Kind:
        base = self._value(node.bases[0]) if node.bases else None
        fields = dict(base.fields) if isinstance(base, Kind) else {}
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    fields[name] = self._value(value)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    fields[name] = Unread(f"{node.name}.{name}", node.lineno)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    fields[name] = self._value(value)
        known = isinstance(base, Named | Kind)
        path = getattr(base, "base", getattr(base, "path", "")) if known else node.name
        return Kind(node, fields, path)

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._scopes[-1][name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = value if isinstance(value, list | tuple) else []
                if isinstance(value, Called) and value.last == "from_pretrained":
                    parts = [value, *(unread(part) for part in targets[1:])]  # and its tokenizer
                for at, part in enumerate(targets):
                    known = len(parts) == len(targets)
                    self._assign(part, parts[at] if known else unread(part))
            case ast.Attribute(value=owner, attr=name):
                found = self._value(owner)
                if isinstance(found, Called):
                    found.kwargs[name] = unread(target) if self._unsure else value
            case ast.Subscript(value=owner, slice=index):
                found, key = self._value(owner), self._value(index)
                if isinstance(found, dict) and isinstance(key, str | int):
                    found[key] = unread(target) if self._unsure else value

    def _enter(self, function: Local, args: list[Any], kwargs: dict[str, Any]) -> Any:
        node = function.node
        if len(self._scopes) > _DEEPEST:
            return unread(node.args)
        self._entered.add(id(node))
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        scope: dict[str, Any] = {
            arg: Unread(f"{arg} of {node.name}()", node.lineno)
            for arg in (*names, *(arg.arg for arg in node.args.kwonlyargs))
        }
        for arg, default in zip(reversed(names), reversed(node.args.defaults), strict=False):
            scope[arg] = self._value(default)
        for only, given in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            scope[only.arg] = scope[only.arg] if given is None else self._value(given)
        scope |= dict(zip(names, args, strict=False)) | kwargs
        if node.args.kwarg is not None:
            scope[node.args.kwarg.arg] = {k: v for k, v in kwargs.items() if k not in names}
        self._scopes.append(scope)
        try:
            self._all(node.body)
        except _Returned as returned:
            return scope.get(_RESULT, returned.value)
        finally:
            self._scopes.pop()
        return scope.get(_RESULT)


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
