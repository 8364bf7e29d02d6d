"""The process that judges one program: the tests run here, the program in a fork.

A name that the tests neither define nor import, and that is not built in, is the program's. Calls
to it run in the other process, and return values of exact built-in types, which are compared here;
so nothing that a program does to Python, and no method of its classes, can make a test pass. The
standard library and a few files of this package are all that is imported, so the process starts
quickly.
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
from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning_rl.rewards.program_calls import ProgramCaller
from lightning_rl.rewards.tested_program import JSONLines, run_program
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
        verdict: dict[str, Any] = {"passed": _passes(JSONLines(ours), **json.load(request))}
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


def _passes(line: JSONLines, program: str, tests: list[str]) -> bool:
    """Tell whether a program passes all tests, which are Python.

    Raises:
        SyntaxError: if the tests do not compile.
        BadTestsError: if the tests never use the program, or pass it something that cannot be sent.
    """
    trees = [ast.parse(text, "<tests>") for text in tests]
    compiled = [compile(tree, "<tests>", "exec") for tree in trees]
    line.send({"program": program})
    caller = ProgramCaller(line)
    names = _Names(caller, _modules_of(trees))
    try:
        for test in compiled:
            exec(test, names)
        passed = not caller.failed
    except BaseException:  # whatever a test raises, SystemExit too: it did not pass
        passed = False
    if caller.unsent:
        raise BadTestsError(caller.unsent)
    if passed and not caller.used:
        raise BadTestsError("the tests never use the program; use a name that it defines")
    return passed


def _modules_of(trees: Iterable[ast.Module]) -> set[str]:
    """Return names that the tests use as modules without importing them; the program's could lie.

    A name counts as a module if it is known as one, and only its attributes are used.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    others = {node.id for node in names if id(node) not in bases}
    return ({node.id for node in names} - others) & {*_ALIASES, *sys.stdlib_module_names}


class _Names(dict[str, Any]):
    """The namespace of the tests: their own names, then built-in ones, then the program's."""

    def __init__(self, caller: ProgramCaller, modules: set[str]) -> None:
        output_of = partial(caller.ask_surely, "output")
        super().__init__(__name__="tests", __builtins__=builtins, output_of=output_of)
        self._caller = caller
        self._modules = modules

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._modules:
            return importlib.import_module(_ALIASES.get(name, name))
        # By Python's convention a name in CapWords is that of a class.
        return self._caller.ask_surely("name", name, own=name[0].isupper() and "_" not in name)
