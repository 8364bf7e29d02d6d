"""The process of a program under test: runs the program, and the judge's requests to it.

A socket leads to the judge, in whose process the tests run. Each message is a line of JSON. The
result of a request is written as a value of exact built-in types, or it stays here, and the judge
knows it by number. So whatever the program does to this process, and whatever its classes say of
themselves, it can only answer. Only the standard library is imported.
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
import os
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

_ITEMS = (tuple, set, frozenset, deque, dict)
_WRITTEN: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: (hex, lambda text: int(text, 16)),
    **{kind: (kind.hex, kind.fromhex) for kind in (bytes, bytearray)},
    complex: (lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    range: (lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    **{kind: (str, kind) for kind in (decimal.Decimal, fractions.Fraction)},
    **{
        kind: (kind.isoformat, kind.fromisoformat)
        for kind in (datetime.date, datetime.datetime, datetime.time)
    },
    datetime.timedelta: (
        lambda t: [t.days, t.seconds, t.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
"""Types of values that JSON lacks: how to write and how to read each."""
VALUE_TYPES = {kind.__name__: kind for kind in (bool, float, str, list, *_ITEMS, *_WRITTEN)}
"""The types of all values but ``None``, by name."""


class JSONLines:
    """A socket on which each message is a JSON object on a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, whose values are already written."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EOFError: if the connection has ended, or the message is too long.
            ValueError: if it is not a JSON object.
        """
        line = self._stream.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message must be a JSON object")
        return message


def written(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return a value as JSON; ``other`` writes what is not exactly of a value's type."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < _JSON_INT):
        return value
    if kind is list:
        return [written(item, other) for item in value]
    if kind in _ITEMS:
        items = value.items() if kind is dict else value
        return {kind.__name__: [written(item, other) for item in items]}
    return {kind.__name__: _WRITTEN[kind][0](value)} if kind in _WRITTEN else other(value)


def read(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the value of its JSON; ``other`` reads, by kind, what is not a value.

    Raises:
        Exception: of various types, if ``value`` was not written by :func:`written`.
    """
    if isinstance(value, list):
        return [read(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, told),) = value.items()
    kind = VALUE_TYPES.get(name, object)
    if kind in _ITEMS:
        return kind(read(told, other))
    return _WRITTEN[kind][1](told) if kind in _WRITTEN else other(name, told)


def error_of(names: list[str], text: str) -> Exception:
    """Return a built-in exception: the first of these classes that is one."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # it wants more than a text
                return kind(text)
    return RuntimeError(text)


# ---------------------------------------------------------------- the program's own process

_CONTENTS: dict[type, Callable[[Any], Any]] = {
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, deque, bytes, bytearray)},
    dict: dict.items,
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}
"""How to find the contents of an object of a subclass, whatever its own methods say."""


class TestedProgram:
    """Serves the judge's requests; keeps the objects that the judge knows by number."""

    def __init__(self, line: JSONLines) -> None:
        self._line = line
        self._source = line.receive()["program"]
        self._module: types.ModuleType | None = None
        self._kept: list[Any] = []
        self._own = {"name": self._named, "output": self._output}

    def serve_one(self, request: dict[str, Any]) -> None:
        """Run what is asked for: an own operation, one of ``operator``, or a built-in one."""
        name = request["do"]
        work = self._own.get(name) or getattr(operator, name, None) or getattr(builtins, name)
        given, named = read(request["given"], self._other)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                value = work(*given, **named)
            # An object of a class that the tests use may be a list or a dictionary, too.
            own = request["own"] and (name != "call" or isinstance(given[0], type))
            answer = {"value": written(value, self._keep if own else self._plain)}
            if value is None:  # then it may have changed what it was given
                answer["changed"] = self._written([*given[1:], named])
            self._line.send(answer | {"printed": printed.getvalue()})
        except BaseException as error:  # whatever the program raises, SystemExit too
            names = [kind.__name__ for kind in type(error).__mro__]
            self._line.send({"raised": names, "text": _text_of(error)})

    def _named(self, name: str) -> Any:
        if self._module is None:
            self._module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
            exec(compile(self._source, "<program>", "exec"), self._module.__dict__)
        return getattr(self._module, name)

    def _output(self, text: str) -> str:
        """Return what the program prints as a script, in a Python of its own, from such input."""
        import subprocess  # only where it is needed: it takes a tenth of all imports

        command = [sys.executable, "-S", "-c", self._source]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, input=text.encode(), stdout=subprocess.PIPE, env=os.environ | path, check=True
        )
        return done.stdout.decode(errors="replace")

    def _written(self, value: Any) -> Any:
        return written(value, self._plain)

    def _plain(self, value: Any) -> Any:
        """Write an object by its contents if it has any, such as a named tuple; else keep it."""
        if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
            return self._written(value.tolist())
        for kind, contents in _CONTENTS.items():
            if isinstance(value, kind):
                return self._written(kind(contents(value)))
        return self._keep(value)

    def _keep(self, value: Any) -> dict[str, Any]:
        self._kept.append(value)
        return {"kept": len(self._kept) - 1}

    def _other(self, kind: str, told: Any) -> Any:
        return self._kept[told] if kind == "kept" else self._function(told)

    def _function(self, number: int) -> Callable[..., Any]:
        """Return a stand-in for a function of the tests, which runs in the judge's process."""

        def call(*given: Any, **named: Any) -> Any:
            self._line.send({"call": number, "given": self._written([list(given), named])})
            while "value" not in (answer := self._line.receive()):
                if "raised" in answer:
                    raise error_of(answer["raised"], answer["text"])
                self.serve_one(answer)
            return read(answer["value"], self._other)

        return call


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # its own code
        return ""


def run_program(connection: socket.socket) -> None:
    """Serve the judge until the connection ends."""
    sys.argv = [PROGRAM]
    line = JSONLines(connection)
    with contextlib.suppress(EOFError, OSError):
        program = TestedProgram(line)
        while True:
            program.serve_one(line.receive())
