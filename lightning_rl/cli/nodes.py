"""The mappings in a configuration, and the models that they name."""

from collections.abc import Iterator
from typing import Any

Tree = dict[str, Any]


def nodes(tree: Any, key: str = "") -> Iterator[tuple[str, Tree]]:
    """Yield all mappings of a configuration, each with its key."""
    if isinstance(tree, dict):
        yield key, tree
        for name, value in tree.items():
            inner = key if name == "init_args" else f"{key}.{name}".lstrip(".")
            yield from nodes(value, inner)
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from nodes(value, f"{key}[{place}]")


def models_in(tree: Any) -> Iterator[Tree]:
    """Yield the mappings whose ``model`` is a directory or a name of the hub.

    That of a policy or another model that learns also has a ``loading``, which may be None.
    """
    return (node for _, node in nodes(tree) if isinstance(node.get("model"), str))
