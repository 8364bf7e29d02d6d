"""A run's whole configuration as a tree, of which nothing is built, and walks through it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Tree = dict[str, Any]


class RequestedRun(NamedTuple):
    """A run as it was asked for: its whole configuration, and which code it may use."""

    tree: Tree
    options: list[str]


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


def class_of(node: Any) -> str:
    """Return the bare name of a configured class; "" if there is none."""
    path = node.get("class_path", "") if isinstance(node, dict) else node
    return path.rpartition(".")[2] if isinstance(path, str) else ""


def inside_run(callbacks: Any, note: Callable[[str, str], None]) -> Iterator[Tree]:
    """Yield callbacks as nodes whose files are in the run's own directory, and that send nothing.

    Args:
        callbacks: as a configuration lists them; changed in place.
        note: gets the key of what is left out, and a sentence on it.
    """
    for callback in listed(callbacks):
        node = callback if isinstance(callback, dict) else {"class_path": callback}
        given = node["init_args"] = node.get("init_args") or {}
        key = f"trainer.callbacks.{class_of(node)}"
        for place in ("dirpath", "directory"):
            if place in given:
                given[place] = None
        if given.get("push_to_hub"):
            given["push_to_hub"] = None
            note(key, "nothing is pushed to the hub")
        if class_of(node) == "RunArtifacts":
            note(key, "no artifact is uploaded")
            continue
        yield node


def listed(value: Any) -> list[Any]:
    """Return what a key holds that takes one or several; a switch and null are none."""
    return value if isinstance(value, list) else [] if value in (None, True, False) else [value]
