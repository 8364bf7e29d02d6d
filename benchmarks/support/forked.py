"""Run programs in processes of their own, forked from one that has imported what they need.

A short run of a program is mostly imports. Here one process imports everything, and does nothing
else; each program begins as a copy of it, and is in all other things a process of its own, with its
arguments, environment, folder, output and end.
"""

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def started(
    module: str,
    arguments: Sequence[Any],
    output: Path,
    environment: Mapping[str, str] = os.environ,
    folder: Path = ROOT,
) -> Any:
    """Begin ``python -m module arguments`` in a ``multiprocessing.Process``.

    What it prints is added to ``output``; ``exitcode`` is its status, or minus the signal that
    ended it.
    """
    words = [str(argument) for argument in arguments]
    return begun(_run_module, (module, words), output, environment, folder)


def begun(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    output: Path,
    environment: Mapping[str, str] = os.environ,
    folder: Path = ROOT,
) -> Any:
    """Call ``function(*arguments)`` in such a process; both travel as pickles."""
    context = get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.forked_imports"])
    with chdir(ROOT):  # where it finds the modules of this checkout
        forkserver.ensure_running()
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    variables = {**environment, "PYTHONPATH": path}  # for those that it starts itself
    place = (output.absolute(), variables, folder.absolute())
    process = context.Process(target=_run, args=(function, arguments, *place))
    process.start()
    return process


def run(module: str, arguments: Sequence[Any], output: Path, **place: Any) -> int:
    """Run the same as ``started`` to its end; return its status."""
    process = started(module, arguments, output, **place)
    process.join()
    status: int = process.exitcode
    return status


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    output: Path,
    environment: dict[str, str],
    folder: Path,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    function(*arguments)


def _run_module(module: str, arguments: list[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
