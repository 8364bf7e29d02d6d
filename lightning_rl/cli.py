"""The command ``lightning-rl``: LightningCLI in subclass mode, with errors a person can act on."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning_rl.errors import LightningRLError

USAGE = """\
usage: lightning-rl <command> [options]

  fit        train: lightning-rl fit --config recipes/sort_digits/grpo.yaml
  validate   evaluate a model or checkpoint on the held-out prompts
  test       the same, under the names test uses
  rollout    write graded rollouts to a file, without training
  doctor     versions, engine, devices, threads, and what is wrong with each

`lightning-rl <command> --help` lists the options, `--print_config` prints a whole configuration;
several --config files are merged in order, and --data.group_size 16 overrides one key."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (2: bad configuration, 1: the run failed)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "doctor":
        from lightning_rl.doctor import main as doctor

        return doctor()
    # Reward functions and prompt factories are named by import path from where the user stands.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from lightning_rl.cli_app import RLCLI

    try:
        RLCLI(args=arguments)
    except LightningRLError as error:
        if os.environ.get("LIGHTNING_RL_TRACEBACK"):
            raise
        print(f"lightning-rl: {type(error).__name__}: {error}", file=sys.stderr)
        print("(LIGHTNING_RL_TRACEBACK=1 shows where it was raised)", file=sys.stderr)
        return _exit_status(error)
    return 0


def _exit_status(error: LightningRLError) -> Any:
    from lightning_rl.errors import ConfigError

    return 2 if isinstance(error, ConfigError) else 1
