"""The process that judges one program: the tests run here, the program in a fork.

A name that the tests neither define nor import, and that is not built in, is the program's. Calls
to it run in the other process, and return plain data, which is compared here; so nothing that a
program does to Python, or to its objects, can make a test pass. The standard library and a few
files of this package are all that is imported, so the process starts quickly.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import resource
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from lightning_rl.rewards.program_object import RemoteObject, number_of
from lightning_rl.rewards.tested_program import JSONSocket, error_of, read, run_program, written
from lightning_rl.run.processes.keeper import keep_others_out

_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}


BEGUN = "begun\n"
"""Written once the program runs under its limits: what happens from then on is its own doing."""


class BadTestsError(ValueError):
    """The tests cannot judge any program."""


def main() -> None:
    """Judge the program on standard input by its tests; write ``BEGUN``, then the verdict.

    The verdict is ``{"passed": ...}``, or ``{"failure": reason}`` if no program could be judged.
    """
    limits = json.loads(sys.argv[1])
    sys.path[:] = limits["path"]
    request, answer = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(limits["directory"])
    _limit(limits)
    keep_others_out()
    ours, theirs = socket.socketpair()
    # The tests are read only afterwards: the program must not have them in its memory.
    if os.fork() == 0:
        for file in (ours, request):
            file.close()
        os.close(answer)
        keep_others_out(False)
        run_program(theirs)
        os._exit(0)
    theirs.close()
    os.write(answer, BEGUN.encode())
    try:
        verdict: dict[str, Any] = {"passed": _passes(JSONSocket(ours), **json.load(request))}
    except (SyntaxError, BadTestsError) as error:
        verdict = {"failure": f"{type(error).__name__}: {error}"[:2000]}
    except MemoryError:
        verdict = {"passed": False}
    os.write(answer, json.dumps(verdict).encode())
    os._exit(0)  # whatever tests left to be done at the end


def _limit(limits: dict[str, Any]) -> None:
    """Limit this process, and the program's."""
    with contextlib.suppress(FileNotFoundError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory runs out, the kernel takes programs, not the trainer
    megabytes = {resource.RLIMIT_AS: limits["memory_mb"], resource.RLIMIT_FSIZE: limits["files_mb"]}
    bounds = {resource.RLIMIT_CORE: 0} | {kind: mb * 2**20 for kind, mb in megabytes.items()}
    if limits["processes"] is not None:
        bounds[resource.RLIMIT_NPROC] = limits["processes"]
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def _passes(line: JSONSocket, program: str, tests: list[str]) -> bool:
    """Tell whether a program passes all tests, which are Python.

    Raises:
        SyntaxError: if the tests do not compile.
        BadTestsError: if the tests never use the program, or pass it something that cannot be sent.
    """
    # Before the program: broken tests are no fault of its.
    trees = [ast.parse(text, "<tests>") for text in tests]
    compiled = [compile(tree, "<tests>", "exec") for tree in trees]
    asker = ProcessClient(line)
    passed = _all_pass(asker, program, compiled, _modules_of(trees))
    if asker.unsent:
        raise BadTestsError(asker.unsent)
    if passed and not asker.asked:
        raise BadTestsError("the tests never use the program; use a name that it defines")
    return passed


def _all_pass(
    asker: "ProcessClient", program: str, tests: Iterable[CodeType], modules: dict[str, str]
) -> bool:
    try:
        asker.begin(program)
        names = _Names(asker, modules)
        for test in tests:
            exec(test, names)
    except MemoryError:
        raise
    except BaseException:  # whatever a test raises, SystemExit too: it did not pass
        return False
    return not asker.failed


def _modules_of(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Find modules that the tests use without importing them; the program's could be forged.

    A name counts as a module if it is known as one, and only its attributes are used.
    """
    seen: dict[str, bool] = {}
    for tree in trees:
        attributes = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                seen[node.id] = seen.get(node.id, True) and id(node) in attributes
    found = {name: _ALIASES.get(name, name) for name, only_base in seen.items() if only_base}
    return {
        name: module
        for name, module in found.items()
        if name in _ALIASES or module in sys.stdlib_module_names
    }


class _Names(dict[str, Any]):
    """The namespace of the tests: their own names, then built-in ones, then the program's."""

    def __init__(self, asker: "ProcessClient", modules: dict[str, str]) -> None:
        super().__init__({"__name__": "tests", "__builtins__": builtins})
        self._asker = asker
        self._modules = modules

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._modules:
            return importlib.import_module(self._modules[name])
        return self._asker.ask("name", name)


class ProcessClient:
    """Sends requests to the program's process, and reads its answers."""

    def __init__(self, line: JSONSocket) -> None:
        self._line = line
        self._functions: list[Callable[..., Any]] = []
        self.asked = 0
        self.failed = False
        """Whether a test's function that the program called failed, or the connection did."""
        self.unsent = ""
        """The error for a value that the tests passed and that cannot be sent; "" if none."""

    def begin(self, program: str) -> None:
        """Run the program; raise whatever it raises."""
        self._line.send({"program": program})
        self._answer("program")

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Run an operation of ``OPERATIONS`` on an object with arguments; return its result.

        Raises:
            Exception: what the program raised, as the nearest built-in exception.
        """
        request: dict[str, Any] = {"do": what, "arguments": [self._written(a) for a in arguments]}
        if named:
            request["named"] = {name: self._written(value) for name, value in named.items()}
        self._line.send(request)
        answer = self._answer(what)
        value = read(answer["value"], self._object)
        self.asked += 1
        if what == "call" and value is None:
            changed, changed_named = read(answer["changed"], self._object)
            _changed(arguments[1:], changed)
            _changed(named, changed_named)
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
                self._line.send(self._called(answer))
            elif "raised" in answer:
                error = error_of(list(map(str, answer["raised"])), str(answer["text"]))
                # Anywhere else it would end the test's own loops, as if all had been seen.
                if isinstance(error, StopIteration | StopAsyncIteration) and what != "next":
                    error = RuntimeError(f"raised {type(error).__name__}")
                raise error
            else:
                print(answer.get("printed", ""), end="")
                return answer

    def _called(self, call: dict[str, Any]) -> dict[str, Any]:
        function = self._functions[call["call"]]
        arguments, named = (read(call[n], self._object) for n in ("arguments", "named"))
        try:
            return {"value": written(function(*arguments, **named), self._told)}
        except Exception as error:
            self.failed = self.failed or isinstance(error, AssertionError)
            return {"raised": [k.__name__ for k in type(error).__mro__], "text": str(error)}

    def _written(self, value: Any) -> Any:
        try:
            return written(value, self._told)
        except TypeError as error:
            self.unsent = self.unsent or str(error)
            raise

    def _told(self, value: Any) -> dict[str, Any]:
        if isinstance(value, RemoteObject):
            return {"kept": number_of(value)}
        if callable(value):
            self._functions.append(value)
            return {"function": len(self._functions) - 1}
        raise TypeError(
            f"the tests pass the program a {type(value).__name__}; pass only plain data, "
            "functions, and objects of its own classes"
        )

    def _object(self, kind: str, told: Any) -> Any:
        if kind == "function":
            return self._functions[told]
        if kind != "kept":
            raise ValueError(f"an answer of kind {kind!r}")
        return RemoteObject(self, told)


def _changed(old: Any, new: Any) -> Any:
    """Update an argument in place to its value after the program's call, as a local call would."""
    if callable(old):  # of the tests, or the program's own object
        return old
    if type(old) is not type(new):
        return new
    if isinstance(old, list | tuple | deque) and len(old) == len(new):
        pairs = [_changed(was, now) for was, now in zip(old, new, strict=True)]
        return old if isinstance(old, tuple) else _refilled(old, pairs)
    if isinstance(old, dict):
        return _refilled(old, {k: _changed(old[k], v) if k in old else v for k, v in new.items()})
    return _refilled(old, new) if isinstance(old, list | set | deque | bytearray) else new


def _refilled(old: Any, content: Any) -> Any:
    old.clear()
    (old.update if isinstance(old, dict | set) else old.extend)(content)
    return old
