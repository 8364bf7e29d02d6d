"""Read configurations as ``lightning-rl`` does, by a parser that a process makes once."""

from collections.abc import Sequence
from functools import cache

from lightning_rl.cli.app import RLCLI
from lightning_rl.cli.parser import RLArgumentParser, checked_sources
from lightning_rl.cli.trust import split_options
from lightning_rl.config.layers import Sources


class _Made(Exception):
    """The parser is there."""


class _Unparsed(RLCLI):
    def parse_arguments(self, parser: object, args: object) -> None:
        raise _Made(self._subcommand_parsers[self._command])


@cache
def parser_of(command: str) -> RLArgumentParser:
    """Return the parser of ``fit``, ``validate``, ``test`` or ``rollout``."""
    try:
        _Unparsed([command])
    except _Made as made:
        return made.args[0]
    raise AssertionError(command)


def read(arguments: Sequence[str]) -> Sources:
    """Check every key, class and value of a command line as the command does; build nothing.

    Raises:
        ConfigError: naming the first mistake.
    """
    command, *rest = arguments
    rest, trusted = split_options(rest)
    return checked_sources(rest, parser_of(command), trusted)
