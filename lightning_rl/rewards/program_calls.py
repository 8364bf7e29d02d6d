"""Calls of a program under test, which give values, or objects that stay in its process."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lightning_rl.rewards.tested_program import VALUE_TYPES, JSONLines, error_of, read, written


class ProgramCaller:
    """Sends requests to the program's process, and reads its answers."""

    def __init__(self, line: JSONLines) -> None:
        self._line = line
        self._functions: list[Callable[..., Any]] = []
        self.used = False
        """True once the tests have used the program."""
        self.failed = False
        """True once what no test may catch has failed: the program as such, the connection to it,
        or an assertion in a function of the tests that it called."""
        self.unsent = ""
        """The error for a value that the tests passed and that cannot be sent; "" if none."""

    def ask_surely(self, what: str, text: str, own: bool = False) -> Any:
        """Ask for what every right program gives: a test that catches a failure still fails."""
        self.used = True
        try:
            return self.ask(what, text, own=own)
        except Exception:
            self.failed = True
            raise

    def ask(self, what: str, *given: Any, own: bool = False, named: Any = None) -> Any:
        """Run an operation in the program's process; return its result.

        Args:
            what: a built-in function, or one of ``operator``.
            given: its arguments.
            own: whether the tests expect an object of the program there, not a value.
            named: keyword arguments.

        Raises:
            Exception: what the program raised, as the nearest built-in exception.
        """
        message = written([list(given), named or {}], self._told)
        self._line.send({"do": what, "own": own, "given": message})
        answer = self._answer(what)
        value = read(answer["value"], self._object)
        if own and isinstance(value, _Object):
            return _Object(self, value._number, own)
        if value is None:
            _changed([*given[1:], named], read(answer["changed"], self._object))
        return value

    def _answer(self, what: str) -> dict[str, Any]:
        """Return the answer; until it comes, serve the program's calls of the tests' functions."""
        while True:
            try:
                answer = self._line.receive()
            except (EOFError, OSError, ValueError, RecursionError):
                self.failed = True  # whatever a test thinks of it
                raise
            if "call" in answer:
                self._line.send(self._called(answer["call"], *read(answer["given"], self._object)))
            elif "raised" in answer:
                error = error_of(list(map(str, answer["raised"])), str(answer["text"]))
                # Anywhere else it would end the test's own loops, as if all had been seen.
                if isinstance(error, StopIteration | StopAsyncIteration) and what != "next":
                    error = RuntimeError(f"raised {type(error).__name__}")
                raise error
            else:
                print(answer.get("printed", ""), end="")
                return answer

    def _called(self, number: int, given: list[Any], named: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": written(self._functions[number](*given, **named), self._told)}
        except Exception as error:
            self.failed = self.failed or isinstance(error, AssertionError)
            return {"raised": [k.__name__ for k in type(error).__mro__], "text": str(error)}

    def _told(self, value: Any) -> dict[str, Any]:
        if isinstance(value, _Object):
            return {"kept": value._number}
        if callable(value):
            self._functions.append(value)
            return {"function": len(self._functions) - 1}
        self.unsent = (
            f"the tests pass the program a {type(value).__name__}; pass only plain data, "
            "functions, and objects of its own classes"
        )
        raise TypeError(self.unsent)

    def _object(self, kind: str, told: Any) -> Any:
        if kind == "function":
            return self._functions[told]
        if kind != "kept":
            raise ValueError(f"an answer of kind {kind!r}")
        return _Object(self, told)


_OF_VALUES = frozenset(
    name for kind in VALUE_TYPES.values() for name in dir(kind) if callable(getattr(kind, name))
)
"""Methods of values: a test that calls one of a function's result means a value's."""


class _Object:
    """An object that stays in the program's process: what a result is that is no value.

    It is never compared. Unless it is of a class that the tests name, it can only be called,
    iterated and given back, and has the attributes whose names are no value's methods.
    """

    __slots__ = ("_caller", "_number", "_own")

    def __init__(self, caller: ProgramCaller, number: int, own: bool = False) -> None:
        for name, value in zip(self.__slots__, (caller, number, own), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._caller.ask("call", self, *arguments, own=self._own, named=named)

    def __getattr__(self, name: str) -> Any:
        # What libraries ask of any object tells them where its memory is.
        if name.startswith(("__", "_as_parameter_")) and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        if name in _OF_VALUES and not self._own:
            _refuse()
        return self._caller.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._caller.ask("setattr", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        return self._caller.ask("iter", self)

    def __next__(self) -> Any:
        return self._caller.ask("next", self)


def _refuse(*_: Any) -> NoReturn:
    raise TypeError(
        "an object of the program is no value: compare what its attributes and methods give"
    )


def _of_its_class(what: str, two: bool) -> Callable[..., Any]:
    def method(self: _Object, *others: Any) -> Any:
        # With a number of the tests' a program could take it for the answer.
        if not self._own or (two and not isinstance(others[0], _Object)):
            _refuse()
        return self._caller.ask(what, self, *others, own=two)

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash"):
    setattr(_Object, f"__{_name}__", _refuse)
for _name in ("len", "str", "repr", "getitem", "setitem", "delitem"):
    setattr(_Object, f"__{_name}__", _of_its_class(_name, two=False))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(_Object, f"__{_name}__", _of_its_class(_name, two=True))


def _changed(old: Any, new: Any) -> Any:
    """Return an argument after the program's call: itself, with its new content, if it can be."""
    if type(old) is not type(new):
        return new
    if callable(old):  # of the tests, or the program's own object
        return old
    if isinstance(old, list | tuple | deque) and len(old) == len(new):
        new = [_changed(was, now) for was, now in zip(old, new, strict=True)]
    if isinstance(old, dict):
        new = {key: _changed(old.get(key), now) for key, now in new.items()}
    if not isinstance(old, list | set | dict | deque | bytearray):
        return tuple(new) if isinstance(old, tuple) else new
    old.clear()
    (old.update if isinstance(old, dict | set) else old.extend)(new)
    return old
