"""Parsers of the commands' options, which raise mistakes and have a short help."""

from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from inspect import isclass, isroutine
from os import PathLike
from typing import Any, NoReturn

from jsonargparse import Namespace, set_dumper
from jsonargparse.typing import get_registered_type
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rl.cli.trust import require_trusted
from lightning_rl.config.layers import Sources, read_sources
from lightning_rl.config.mistakes import check_sources, innermost
from lightning_rl.config.yaml_text import dump_yaml
from lightning_rl.errors import ConfigError
from lightning_rl.run.seeding import LARGEST_SEED

HELP = """\
usage: lightning-rl {command} --config FILE [--config FILE ...] [--key value ...]

{description}

  -c, --config FILE    YAML; later files and options win over earlier ones
  --model CLASS        PolicyModule, or SFTModule for supervised training; --model.KEY its arguments
  --data CLASS         RLDataModule or SFTDataModule; --data.KEY its arguments
  --trainer.KEY        arguments of Lightning's Trainer
{own}
  --print_config       print the whole configuration, defaults included, and stop
  --trusted_only       allow no code but this library's own; --trust MODULE allows another module

Any key may be set on the command line: --data.group_size 16, --trainer.callbacks+=StepTimer.
List the options of a class:  lightning-rl {command} --model.help PolicyModule
                              lightning-rl {command} --data.help RLDataModule
                              lightning-rl {command} --trainer.callbacks.help Evaluate
                              lightning-rl {command} --trainer.help
"""

# Lightning's own texts for these run over half a page.
OWN_HELP = {
    "seed_everything": "seed of all random generators; true draws one (default: 0)",
    "ckpt_path": "checkpoint to resume from, or to use",
    "checkpoints": "several checkpoints, as a list or a folder; prints one table of all tests",
    "weights_only": "false also loads pickled objects, from a file that you trust",
    "allow_changes": "with ckpt_path: true, or the keys that may differ from the run so far",
    "verbose": "print the metrics at the end (default: true)",
}

# By its own, a text such as "1e5" comes back from a run's config.yaml as a number.
set_dumper("yaml", partial(dump_yaml, default_flow_style=False, allow_unicode=True))


class RLArgumentParser(LightningArgumentParser):
    """A parser that raises mistakes instead of printing usage, and whose help fits a screen."""

    command = ""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser inside the parser, that tries one member of a union
            super().error(message, ex)
        raise innermost(ex or ValueError(message)) from ex

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return the configuration as text, including defaults, but without values that are
        objects.

        Objects cannot be written as text. If a configuration leaves them out, they take their
        defaults. The arguments are already validated, and validating them again would take twice as
        long.
        """
        kwargs.setdefault("skip_validation", True)
        return str(super().dump(without_objects(namespace), *args, **kwargs))

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        if not self.command:
            return super().format_help(*args, **kwargs)
        groups = ("model", "data", "trainer")
        own = [
            f"  --{action.dest:<18} {OWN_HELP.get(action.dest) or action.help}"
            for action in self._actions
            if hasattr(action, "_typehint") and action.dest.split(".")[0] not in groups
        ]
        return HELP.format(
            command=self.command,
            description=self.description,
            own="\n".join(own),
        )


def without_objects(value: Any) -> Any:
    """Return arguments without those that hold an object, which only a default can."""
    if isinstance(value, Namespace):
        held = {name: without_objects(inner) for name, inner in vars(value).items()}
        return Namespace(**{name: inner for name, inner in held.items() if _is_sayable(inner)})
    if isinstance(value, list):
        return [without_objects(item) for item in value]
    if isinstance(value, dict):
        return {name: without_objects(item) for name, item in value.items()}
    return value


def _is_sayable(value: Any) -> bool:
    """Return True if text can express it: a number, a name of code, or a collection of these."""
    if isinstance(value, Mapping):
        return all(map(_is_sayable, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_sayable, value))
    kinds = (Namespace, bool, int, float, str, Enum, PathLike)
    if value is None or isinstance(value, kinds) or isclass(value) or isroutine(value):
        return True
    return get_registered_type(type(value)) is not None  # such as a timedelta


def checked_sources(
    arguments: Sequence[str], parser: LightningArgumentParser, trusted: Sequence[str] | None
) -> Sources:
    """Read files and options, and check them, so that the parser will find no mistake.

    Args:
        arguments: files and options of a command line, without its command.
        parser: the command's parser.
        trusted: modules that may be named; None: all.

    Raises:
        ConfigError: naming code that is not trusted, before it is imported, or the first mistake.
    """
    sources = read_sources(arguments)
    if trusted is not None:
        require_trusted(sources.tree, trusted)
    seed = sources.tree.get("seed_everything")
    if isinstance(seed, int) and not 0 <= seed <= LARGEST_SEED:  # false is 0, and leaves all as is
        source = sources.place(("seed_everything",))
        raise ConfigError(
            f"seed_everything={seed!s:.30} must be in [0, {LARGEST_SEED}]\n  at {source}"
        )
    prints = any(argument.startswith("--print_config") for argument in arguments)
    check_sources(sources, parser, complete=not prints, files=trusted is None)
    return sources


def as_checked(sources: Sources, arguments: Sequence[str]) -> list[str]:
    """Return options with which a parser reads what was checked, and prints what it is asked to.

    It would read the options themselves once per level of the key: null would become "None".
    """
    prints = [argument for argument in arguments if argument.startswith("--print_config")]
    return ["--config", dump_yaml(sources.tree), *prints]


def trainer_help() -> str:
    """Return the help text of the Trainer's options."""
    parser = LightningArgumentParser(description="", usage=SUPPRESS, add_help=False)
    parser.add_class_arguments(Trainer, "trainer")
    return str(parser.format_help())
