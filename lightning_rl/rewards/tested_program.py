"""The process of a program under test: runs the program, and the judge's requests to it.

A socket leads to the judge, in whose process the tests run. The first message is the program. Each
further message is a request, answered by plain data, or by the number of an object that stays here.
So whatever the program does to this process, it can only answer.

Both sides share :class:`JSONSocket` and the form of values. Only the standard library is imported.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import decimal
import fractions
import io
import json
import operator
import socket
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

PROGRAM = "program"
"""Name of the program's module."""
_LONGEST = 2**26  # bytes of a message
_JSON_INT = 2**53

ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
}
"""Container types of plain data, and how to make each from a list of its items."""
WRITTEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (hex, lambda text: int(text, 16)),
    "bytes": (bytes.hex, bytes.fromhex),
    "bytearray": (bytearray.hex, bytearray.fromhex),
    "complex": (lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    "range": (lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "Decimal": (str, decimal.Decimal),
    "Fraction": (str, fractions.Fraction),
    "date": (datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "time": (datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        lambda t: [t.days, t.seconds, t.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
"""Types of plain data that JSON lacks: how to write and how to read each."""
_WRITTEN_TYPES = {
    kind: kind.__name__
    for kind in (
        *(int, bytes, bytearray, complex, range, decimal.Decimal, fractions.Fraction),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta),
    )
}
_ITEM_TYPES = {kind: kind.__name__ for kind in (tuple, set, frozenset, deque, dict)}


class JSONSocket:
    """A socket on which each message is a JSON object, preceded by its length."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            ValueError: if it is too long, or cannot be written as JSON.
        """
        data = json.dumps(message).encode()
        if len(data) > _LONGEST:
            raise ValueError(
                f"a message of {len(data)} bytes is too long; the maximum is {_LONGEST}"
            )
        self._connection.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EOFError: if the connection has ended.
            ValueError: if it is too long, or not a message of :meth:`send`.
        """
        length = int.from_bytes(self._exactly(4), "big")
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes is too long; the maximum is {_LONGEST}")
        message = json.loads(self._exactly(length))
        if not isinstance(message, dict):
            raise ValueError("a message must be a JSON object")
        return message

    def _exactly(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise EOFError
        return data


def written(value: Any, other: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a value as JSON; ``other`` writes a value that is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < _JSON_INT):
        return value
    if kind is list:
        return [written(item, other) for item in value]
    if kind in _ITEM_TYPES:
        items = value.items() if kind is dict else value
        return {_ITEM_TYPES[kind]: [written(item, other) for item in items]}
    if kind in _WRITTEN_TYPES:
        return {_WRITTEN_TYPES[kind]: WRITTEN[_WRITTEN_TYPES[kind]][0](value)}
    return other(value)


def read(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the value of its JSON; ``other`` reads, by kind, what is not plain data.

    Raises:
        Exception: of various types, if ``value`` was not written by :func:`written`.
    """
    if isinstance(value, list):
        return [read(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, told),) = value.items()
    if kind in ITEMS:
        return ITEMS[kind]([read(item, other) for item in told])
    if kind in WRITTEN:
        return WRITTEN[kind][1](told)
    return other(kind, told)


_PLAIN: tuple[Any, ...] = (
    int,
    float,
    str,
    bytes,
    list,
    tuple,
    set,
    frozenset,
    dict,
    deque,
)


def plain_form(value: Any) -> Any:
    """Return an instance of a plain type's subclass, such as a named tuple, as plain data.

    Raises:
        TypeError: if the value is not of such a class.
    """
    if type(value).__module__.partition(".")[0] == "numpy":
        return value.tolist()
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} is not plain data")


# ---------------------------------------------------------------- the program's own process

OPERATIONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "abs")
} | {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "attribute": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "length": len,
    "iterate": iter,
    "next": next,
    "text": str,
    "represent": repr,
    "float": float,
    "int": int,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    "plain": plain_form,
}
"""Operations that a judge may request, on an object and with arguments."""


class Answers:
    """Serves the judge's requests; keeps the objects that the judge knows by number."""

    def __init__(self, line: JSONSocket) -> None:
        self.line = line
        self.module = types.ModuleType(PROGRAM)
        self.kept: list[Any] = []
        sys.modules[PROGRAM] = self.module
        OPERATIONS["name"] = self._named

    def serve(self) -> None:
        """Run the program, then answer requests until the connection ends."""
        source = self.line.receive()["program"]
        self._answer(lambda: exec(compile(source, "<program>", "exec"), self.module.__dict__))
        while True:
            self._serve_one(self.line.receive())

    def _serve_one(self, request: dict[str, Any]) -> None:
        operation = OPERATIONS[request["do"]]
        arguments = [self._read(value) for value in request["arguments"]]
        named = {name: self._read(value) for name, value in request.get("named", {}).items()}
        # A function that returns nothing may have changed what it was given.
        self._answer(lambda: operation(*arguments, **named), lambda: (tuple(arguments[1:]), named))

    def _answer(
        self, work: Callable[[], Any], changed: Callable[[], Any] = lambda: ([], {})
    ) -> None:
        printed = io.StringIO()
        answer: dict[str, Any] = {}
        try:
            with contextlib.redirect_stdout(printed):
                value = work()
            answer["value"] = self._written(value)
            if value is None:
                answer["changed"] = self._written(changed())
            answer["printed"] = printed.getvalue()
            self.line.send(answer)
        except BaseException as error:  # whatever the program raises, SystemExit too
            names = [kind.__name__ for kind in type(error).__mro__]
            self.line.send({"raised": names, "text": _text_of(error)})

    def _named(self, name: str) -> Any:
        try:
            return self.module.__dict__[name]
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None

    def _written(self, value: Any) -> Any:
        return written(value, self._keep)

    def _keep(self, value: Any) -> dict[str, Any]:
        self.kept.append(value)
        return {"kept": len(self.kept) - 1}

    def _read(self, value: Any) -> Any:
        return read(value, self._other)

    def _other(self, kind: str, told: Any) -> Any:
        return self.kept[told] if kind == "kept" else self._function(told)

    def _function(self, number: int) -> Callable[..., Any]:
        """Return a stand-in for a function of the tests, which runs in the judge's process."""

        def call(*arguments: Any, **named: Any) -> Any:
            told = {"arguments": self._written(arguments), "named": self._written(named)}
            self.line.send({"call": number, **told})
            while "value" not in (answer := self.line.receive()):
                if "raised" in answer:
                    raise error_of(answer["raised"], answer["text"])
                self._serve_one(answer)
            return self._read(answer["value"])

        return call


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # its own code
        return ""


def error_of(names: list[str], text: str) -> Exception:
    """Return a built-in exception: the first of these classes that is one."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # it wants more than a text
                continue
    return RuntimeError(text)


def run_program(connection: socket.socket) -> None:
    """Serve the judge until the connection ends."""
    sys.argv = [PROGRAM]
    with contextlib.suppress(EOFError, OSError):
        Answers(JSONSocket(connection)).serve()
