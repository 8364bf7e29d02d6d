"""Objects of a program under test, as the tests see them from another process."""

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class ProgramChannel(Protocol):
    """Sends requests to the program's process."""

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Run an operation of ``OPERATIONS`` on an object with arguments; return its result."""


_WORDLESS = frozenset(
    name
    for kind in (str, bytes, int, float, set, dict, list)
    for name in dir(kind)
    if name.startswith(("is", "startswith", "endswith"))
)
"""Predicates of built-in types: computed here on plain data, never by the program's object."""


class RemoteObject:
    """A proxy of an object in the program's process.

    It supports calls, attributes and items. Comparisons use its value as plain data, if it has one,
    and never call the object's own ``__eq__``.
    """

    __slots__ = ("_asker", "_number")

    def __init__(self, asker: ProgramChannel, number: int) -> None:
        object.__setattr__(self, "_asker", asker)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        # What libraries ask of any object tells them where its memory is.
        if name.startswith(("__", "_as_parameter_")) and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        if name in _WORDLESS:
            return getattr(plain(self), name)
        return _ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("set", self, name, value)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return plain(self)[place]
        return _ask("item", self, place)

    def __setitem__(self, place: Any, value: Any) -> None:
        _ask("set_item", self, place, value)

    def __delitem__(self, place: Any) -> None:
        _ask("delete_item", self, place)

    def __len__(self) -> int:
        return int(_ask("length", self))

    def __iter__(self) -> Iterator[Any]:
        return _ask("iterate", self)

    def __next__(self) -> Any:
        return _ask("next", self)

    def __str__(self) -> str:
        return _of_type(str, _ask("text", self))

    def __repr__(self) -> str:
        return _of_type(str, _ask("represent", self))

    def __float__(self) -> float:
        return _of_type(float, _ask("float", self))

    def __int__(self) -> int:
        return _of_type(int, _ask("int", self))

    def __bool__(self) -> bool:
        return bool(plain(self))

    def __hash__(self) -> int:
        return hash(plain(self))

    def __enter__(self) -> Any:
        return _ask("enter", self)

    def __exit__(self, *_: object) -> None:
        _ask("exit", self)  # whatever it says: it must not hide what a test found


def plain(value: Any) -> Any:
    """Return a program's object as plain data, and plain data unchanged.

    Raises:
        TypeError: if the object is not plain data.
    """
    found = _ask("plain", value) if isinstance(value, RemoteObject) else value
    if isinstance(found, RemoteObject):
        raise TypeError("it is not plain data")
    return found


def _ask(what: str, remote: RemoteObject, *arguments: Any, **named: Any) -> Any:
    return object.__getattribute__(remote, "_asker").ask(what, remote, *arguments, **named)


def number_of(remote: RemoteObject) -> int:
    """Return the number by which the other process knows the object."""
    return object.__getattribute__(remote, "_number")


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"not a {kind.__name__}")
    return value


def _compares(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def method(self: RemoteObject, other: Any) -> Any:
        if isinstance(other, RemoteObject):
            raise TypeError("cannot compare two objects of the program; compare plain data")
        return compare(plain(self), other)

    return method


def _computes(name: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    compute = getattr(operator, name)

    def method(self: RemoteObject, other: Any) -> Any:
        # With a number of the tests' it is done here: the program must not read it.
        if isinstance(other, RemoteObject):
            return _ask(name, self, other)
        return compute(plain(self), other)

    def reflected(self: RemoteObject, other: Any) -> Any:
        return compute(other, plain(self))

    return method, reflected


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _compares(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    for _prefix, _method in zip(("", "r"), _computes(_name), strict=True):
        setattr(RemoteObject, f"__{_prefix}{_name}__", _method)
for _name in ("neg", "abs"):
    setattr(RemoteObject, f"__{_name}__", lambda self, _name=_name: _ask(_name, self))
