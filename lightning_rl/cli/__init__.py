"""The command ``lightning-rl``: LightningCLI in subclass mode, with errors a person can act on."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from lightning_rl.errors import ConfigError, DataError, LightningRLError, RunInterrupted


class Command(NamedTuple):
    """A command: the module whose ``main`` it is, and what it does, in a line."""

    module: str
    does: str
    imports: bool = True
    """It may import code that the user names, from where the user stands."""


_APP = "lightning_rl.cli.app"

COMMANDS = {
    "fit": Command(_APP, "train: lightning-rl fit --config recipes/sort_digits/grpo.yaml"),
    "validate": Command(_APP, "evaluate a model or checkpoint on the held-out prompts"),
    "test": Command(_APP, "the same, under the names test uses"),
    "rollout": Command(_APP, "write graded rollouts to a file, without training"),
    "staged": Command(
        "lightning_rl.games.staged.command",
        "train by fine-tune jobs, of an API or on this machine, stage by stage",
    ),
    "rollouts": Command(
        "lightning_rl.cli.rollouts", "show what such a file, or a replay buffer, holds", False
    ),
    "view": Command(
        "lightning_rl.cli.view.command",
        "show runs in a browser: curves, step times, rollouts by token",
        False,
    ),
    "rerun": Command(
        "lightning_rl.cli.rerun",
        "do a recorded rollout or iteration again, and say where it first differs",
    ),
    "check": Command(
        "lightning_rl.cli.check",
        "what a configuration amounts to, and a first rollout; writes nothing",
    ),
    "convert": Command(
        "lightning_rl.convert.main",
        "read a configuration of TRL or verl and write ours, saying what it could not carry",
        False,
    ),
    "doctor": Command(
        "lightning_rl.cli.doctor",
        "versions, engine, devices, threads, and what is wrong with each",
        False,
    ),
}

_LINES = "\n".join(f"  {name:<11}{command.does}" for name, command in COMMANDS.items())
USAGE = f"""\
usage: lightning-rl <command> [options]

{_LINES}

`lightning-rl <command> --help` says more, `--print_config` prints a whole configuration;
several --config files are merged in order, and --data.group_size 16 overrides one key.
`lightning-rl --version` prints the version; LIGHTNING_RL_TRACEBACK=1 shows where errors arise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    2: bad configuration or data, 1: the run failed, 128 + n: signal n, 124: ``max_time``.

    Args:
        argv: the command and its options; None: those of this process, which is then the command.
    """
    if argv is not None:
        return _main(list(argv))
    from lightning_rl.cli.process import run_to_the_end

    return run_to_the_end(lambda: _main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"lightning-rl {version('lightning_rl')}")
        return 0
    try:
        return _run(arguments)
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


def _run(arguments: list[str]) -> int:
    name, *options = arguments
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"no command {name!r}{meant} (commands: {', '.join(COMMANDS)})")
    command = COMMANDS["check" if name == "fit" and "--dry_run" in options else name]
    if not command.imports:
        return int(import_module(command.module).main(options))
    _search_working_directory(arguments)
    from lightning_rl.cli.process import quiet

    with quiet(), ExitStack() as stack:
        if name == "fit" and command.module == _APP:
            from lightning_rl.run.interrupts import stopped_while_starting

            stack.enter_context(stopped_while_starting())
        # Lightning's parser wants the command itself.
        given = arguments if command.module == _APP else options
        return int(import_module(command.module).main(given))


def _search_working_directory(arguments: list[str]) -> None:
    """Rewards and prompt factories are named by import path from where the user stands.

    A stranger's folder may hold a ``yaml.py``, though: with ``--trusted_only`` nothing is imported
    from it, and with ``--trust`` only what is not installed.
    """
    here = os.getcwd()
    names = {argument.partition("=")[0] for argument in arguments}
    if not names & {"--trust", "--trusted_only"}:
        if here not in sys.path:
            sys.path.insert(0, here)
        return
    sys.path[:] = [place for place in sys.path if place not in ("", here)]
    if "--trust" in names:
        sys.path.append(here)
