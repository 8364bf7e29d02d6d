"""The command ``lightning-rl``: LightningCLI in subclass mode, with actionable error messages."""

import errno
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from lightning_rl.config import packages
from lightning_rl.errors import ConfigError, DataError, LightningRLError, RunInterrupted
from lightning_rl.run.garbage_collection import uncollected
from lightning_rl.run.interpreter import require_docstrings, require_utf8
from lightning_rl.run.processes.openmp import spin_briefly

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Command(NamedTuple):
    """A command: the module whose ``main(arguments)`` runs it, and a one-line description.

    ``main`` returns the exit status. A package adds a command by an entry point of the group
    ``lightning_rl.commands``.
    """

    module: str
    does: str
    imports: bool = True
    """True if it may import code that the user names, from the working directory."""
    trusts: bool = True
    """False if it reads strangers' files: nothing comes from there unless ``--trust`` names it."""


_APP = "lightning_rl.cli.app"

COMMANDS = {
    "quickstart": Command(
        "lightning_rl.cli.quickstart",
        "train a model of 135M parameters in minutes, and show its accuracy rise",
        False,
    ),
    "fit": Command(_APP, "train: lightning-rl fit --config recipes/sort_digits/grpo.yaml"),
    "validate": Command(_APP, "evaluate a model or checkpoint on the held-out prompts"),
    "test": Command(_APP, "the same as validate, with metrics named test"),
    "rollout": Command(_APP, "write graded rollouts to a file, without training"),
    "staged": Command(
        "lightning_rl.games.staged.command",
        "train by fine-tuning jobs, of an API or on this machine, stage by stage",
    ),
    "rollouts": Command(
        "lightning_rl.cli.rollouts",
        "show the contents of such a file, or of a replay buffer",
        False,
    ),
    "view": Command(
        "lightning_rl.cli.view.command",
        "show runs in a browser: curves, step times, rollouts by token",
        False,
    ),
    "rerun": Command(
        "lightning_rl.cli.rerun",
        "repeat a recorded rollout or iteration, and report its first difference",
    ),
    "bisect": Command(
        "lightning_rl.cli.bisect",
        "find the iteration with which a metric dropped, and what in its update did that",
    ),
    "audit": Command(
        "lightning_rl.cli.audit",
        "check a run's files against its ledger, and repeat a share of its iterations",
    ),
    "pack": Command(
        "lightning_rl.cli.pack.packing",
        "write one update of a run to a file, to make it again elsewhere",
    ),
    "unpack": Command(
        "lightning_rl.cli.pack.unpacking",
        "check such a file, write its run directory, and make its update again",
        trusts=False,
    ),
    "check": Command(
        "lightning_rl.cli.check.command",
        "show what a configuration does, and a first rollout; writes nothing",
    ),
    "rehearse": Command(
        "lightning_rl.cli.rehearse",
        "try a big run as a small one on a CPU, and look for what would cost it hours",
    ),
    "compare": Command(
        "lightning_rl.cli.compare",
        "train two configurations on the same seeds until one is better",
    ),
    "help": Command(
        "lightning_rl.cli.help", "show the arguments of a class: lightning-rl help PolicyModule"
    ),
    "doctor": Command(
        "lightning_rl.cli.check.doctor",
        "check versions, engine, devices and threads, and list problems",
        False,
    ),
}
"""This package's commands; other packages add theirs."""

_USAGE = """\
usage: lightning-rl <command> [options]

{}

`lightning-rl <command> --help` says more, `--print_config` prints a whole configuration;
several --config files are merged in order, and --data.group_size 16 overrides one key.
`lightning-rl --version` prints the version; LIGHTNING_RL_TRACEBACK=1 shows where errors arise."""


def _added() -> dict[str, "EntryPoint"]:
    return packages.added(packages.COMMANDS, frozenset(COMMANDS))


def usage() -> str:
    """Return the text that is printed without a command: it lists all commands, also of other
    packages.
    """
    lines = {name: command.does for name, command in COMMANDS.items()}
    for name in _added():
        try:
            lines[name] = find_command(name).does
        except ConfigError as error:  # the others can be used
            lines[name] = str(error)
    return _USAGE.format("\n".join(f"  {name:<11}{does}" for name, does in lines.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    It is 2 for a bad configuration or bad data, 1 if the run failed, 128 + n after signal n, and
    124 after ``max_time``.

    Args:
        argv: the command and its options; None: the options of this process, which becomes the
            command.
    """
    if argv is not None:
        return _main(list(argv))
    spin_briefly()
    from lightning_rl.cli.process import run_to_the_end

    return run_to_the_end(lambda: _main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    try:
        return _with_names(arguments)
    except LightningRLError as error:
        if os.environ.get("LIGHTNING_RL_TRACEBACK"):
            raise
        # ConfigError is a "config error", WeightSyncError a "weight sync error".
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
        from lightning_rl.cli.process import printable

        print(printable(f"lightning-rl: {kind}: {error}"), file=sys.stderr)
        if isinstance(error, RunInterrupted):
            return error.status
        return 2 if isinstance(error, ConfigError | DataError) else 1


def _with_names(arguments: list[str]) -> int:
    """Run a command, and tell a name that no file can have as a mistake."""
    try:
        return _run(arguments)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        what = f"{str(error.filename)[:60]!r}... has a part that is too long for a file's name"
        raise ConfigError(f"{what}; shorten it (most file systems allow 255 bytes)") from error


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"lightning-rl {version('lightning_rl')}")
        return 0
    require_docstrings()
    require_utf8()
    name, *options = arguments
    command = find_command("check" if name == "fit" and "--dry_run" in options else name)
    if not command.imports:
        return int(import_module(command.module).main(options))
    _search_working_directory(command.trusts, arguments)
    with uncollected():
        from lightning_rl.cli.process import quiet
    with quiet(), ExitStack() as stack:
        if name == "fit" and command.module == _APP:
            from lightning_rl.run.loop.interrupts import stopped_while_starting

            stack.enter_context(stopped_while_starting())
        with uncollected():
            module = import_module(command.module)
        # Lightning's parser wants the command itself.
        return int(module.main(arguments if command.module == _APP else options))


def find_command(name: str) -> Command:
    """Return the command of this name, from this package or another.

    Raises:
        ConfigError: if there is none, or its package cannot be imported.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    if name in _added():
        point = _added()[name]
        command = packages.load(point)
        if not isinstance(command, Command):
            raise ConfigError(f"{point.value} must be a Command, not a {type(command).__name__}")
        return command
    if name in packages.OPTIONAL_COMMANDS:
        lacking = packages.lacking(packages.OPTIONAL_COMMANDS[name])
        raise ConfigError(f"no command {name!r}; {lacking}")
    known = [*COMMANDS, *_added()]
    close = get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"no command {name!r}{meant} (commands: {', '.join(known)})")


def _search_working_directory(trusts: bool, arguments: list[str]) -> None:
    """Search the working directory for rewards and prompt factories, which have import paths.

    An untrusted folder may hold a ``yaml.py``, though: with ``--trusted_only`` nothing is imported
    from it, and with ``--trust`` only modules that are not installed.
    """
    here = os.getcwd()
    names = {argument.partition("=")[0] for argument in arguments}
    if trusts and not names & {"--trust", "--trusted_only"}:
        if here not in sys.path:
            sys.path.insert(0, here)
        return
    sys.path[:] = [folder for folder in sys.path if folder not in ("", here)]
    if "--trust" in names:
        sys.path.append(here)
