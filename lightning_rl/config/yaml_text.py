"""Untrusted YAML: read without hanging, and refused with one line."""

import re
from copy import deepcopy
from enum import Enum
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_rl.errors import ConfigError

DEEPEST = 100
"""Maximum depth of a configuration; real ones have a dozen levels."""
MOST_NODES = 100_000
"""Maximum number of keys and values, aliases expanded: a few nested aliases can expand to billions.
"""


class _Dumper(yaml.SafeDumper):
    """Quotes texts that jsonargparse, unlike YAML 1.1, would read as numbers: ``1e5``."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)([eE][-+]?[0-9]+)?$"),
    [*"-+.0123456789"],
)


class _Loader(yaml.SafeLoader):
    """Reads ``1e5`` as a number, as jsonargparse does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    [*"-+.0123456789"],
)


_Dumper.add_multi_representer(  # a default of another library, such as Lightning's Interval
    Enum, lambda dumper, member: dumper.represent_data(member.value)
)


def dump_yaml(values: Any, **options: Any) -> str:
    """Write values as YAML that reads back as the same values, in the same order."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, **options))


def parse_yaml(text: str, place: str) -> Any:
    """Return the content of a YAML text; errors name ``place``.

    Raises:
        ConfigError: if it is invalid YAML, or too deep or large for a configuration.
    """
    return parse_yaml_nodes(text, place)[1]


def parse_yaml_nodes(text: str, place: str) -> tuple[yaml.Node | None, Any]:
    """Return the nodes of a YAML text as written, with their lines, and its content.

    Raises:
        ConfigError: as :func:`parse_yaml` does.
    """
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        _size(root, place, {}, [])
        written = deepcopy(root)  # to construct is to write out in the nodes what `<<` merges
        return written, loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{place}{line}: not valid YAML: {error.problem or error}") from error
    except RecursionError as error:
        raise ConfigError(_too_deep(place)) from error
    # Of dates that no calendar has, and of numbers of thousands of digits, Python tells.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        message = " ".join(str(error).split())
        raise ConfigError(f"{place}: not valid YAML: {message}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _size(node: yaml.Node, place: str, known: dict[int, int], above: list[int]) -> int:
    """Count the nodes that this one expands to, aliases followed.

    Raises:
        ConfigError: if there are too many, too deep, or one contains itself.
    """
    if id(node) in known:
        return known[id(node)]
    where = f"{place}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise ConfigError(f"{where}: an alias contains itself; write its value out")
    if len(above) > DEEPEST:
        raise ConfigError(_too_deep(where))
    below = [*above, id(node)]
    size = 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(item, place, known, below) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_size(item, place, known, below) for pair in node.value for item in pair)
    if size > MOST_NODES:
        raise ConfigError(
            f"{where}: expands to more than {MOST_NODES:,} keys and values through aliases; "
            "no configuration is that large"
        )
    known[id(node)] = size
    return size


def _too_deep(place: str) -> str:
    return f"{place}: more than {DEEPEST} levels deep; no configuration is that deep"
