"""Read a checkout's modules, the library's floor plan, and which modules import which."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]

FLOORS = {
    "words and tools": ("errors", "rollout", "config", "run"),
    "data and models": ("vision", "data", "models", "algos"),
    "who writes, who grades": ("engines", "agents", "rewards"),
    "sync, collect, learn": ("sync", "collect", "learn"),
    "Lightning's faces": ("module", "datamodule"),
    "around them": ("callbacks", "extend", "cli", "__main__"),
    "wings, and rooms that may be left out": (
        "serving",
        "envs",
        "games",
        "convert",
        "verifiers",
        "openenv",
    ),
}
"""The floor plan, from the ground up: folders and files of ``lightning_rl/``."""

ORDER = tuple(room for floor in FLOORS.values() for room in floor)
"""Each may import what stands before it, and nothing else."""


@dataclass(frozen=True)
class Arrow:
    """A file that imports another; both are dotted names of modules."""

    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported}"


def modules_of(root: Path, *packages: str) -> dict[str, Path]:
    """Return dotted names of a checkout's modules; ``callbacks/`` is ``lightning_rl.callbacks``."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root).with_suffix("")
            parts = [*place.parts[:-1], *(() if place.name == "__init__" else (place.name,))]
            if package == "callbacks":
                parts = ["lightning_rl", *parts]
            if place.parts[:2] == ("lightning_rl", "callbacks"):  # a link to callbacks/
                continue
            found[".".join(parts)] = path
    return found


def arrows(modules: dict[str, Path]) -> set[Arrow]:
    """Return every import of one of the modules by another."""
    return {
        Arrow(name, imported)
        for name, path in modules.items()
        for target in _imports(ast.parse(path.read_text("utf-8")))
        if (imported := _module(target, modules)) is not None and imported != name
    }


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield dotted names that a file imports; the library has absolute imports only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(name: str, modules: Iterable[str]) -> str | None:
    """Return the module that a dotted name is, or is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def room(module: str) -> str:
    """Return the folder of the library that a module is in, or its own name at the root."""
    return module.split(".")[1] if "." in module else module


DOORS = {"lightning_rl", "lightning_rl.__main__"}
"""The modules that are no room: the package itself, and its command."""


def folder_of(module: str, path: Path) -> str:
    """Return the folder that a module is in, however deep; at the root the module itself."""
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return module if folder == "lightning_rl" else folder


def back_up(found: Iterable[Arrow], order: tuple[str, ...] = ORDER) -> list[Arrow]:
    """Return arrows from a room to one that does not stand before it, but not to the package.

    Raises:
        ValueError: if a room is not in the order.
    """
    place = {name: number for number, name in enumerate(order)}
    wrong = []
    for arrow in sorted(found, key=str):
        above, below = room(arrow.importer), room(arrow.imported)
        if "lightning_rl" in (arrow.importer, arrow.imported) or above == below:
            continue
        if missing := {above, below} - set(order):
            raise ValueError(f"{missing.pop()} has no place in ORDER; {arrow}")
        if place[below] > place[above]:
            wrong.append(arrow)
    return wrong


def both_ways(found: Iterable[Arrow]) -> list[tuple[str, str]]:
    """Return pairs of folders that import each other; files at the root are none."""
    pairs = {
        (room(a.importer), room(a.imported))
        for a in found
        if a.importer.count(".") > 1 and a.imported.count(".") > 1
    }
    rooms = sorted({name for pair in pairs for name in pair})
    return [(a, b) for a, b in combinations(rooms, 2) if {(a, b), (b, a)} <= pairs]


def circles(found: Iterable[Arrow]) -> list[list[str]]:
    """Return groups of files that reach each other by imports (Tarjan's components)."""
    targets: dict[str, list[str]] = defaultdict(list)
    for arrow in found:
        targets[arrow.importer].append(arrow.imported)
    reach = {name: _reached(name, targets) for name in list(targets)}
    groups = {
        tuple(sorted({name, *(n for n in reached if name in reach.get(n, ()))}))
        for name, reached in reach.items()
        if name in reached
    }
    return [list(group) for group in sorted(groups)]


def _reached(start: str, targets: dict[str, list[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(targets[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += targets.get(name, ())
    return seen
