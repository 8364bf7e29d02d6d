"""The house in numbers: how large it is, and whether imports run in one direction only.

    python -m benchmarks.house
    python -m benchmarks.house --at 4badfb1     (the same of another commit)
    python -m benchmarks.house --no-ways        (without the tiny trainings of house_ways.py)
    python -m benchmarks.house --picture docs/images/house.svg

An import counts wherever it stands: at the top of a file, in a function, or for type checkers only.
``ORDER`` is the library's floor plan: a room may import those that stand before it, and no other. A
unit test holds the code against it, and the picture in docs/architecture.md too.

``rooms`` are all folders of ``lightning_rl/``, those in others included, and the files at its root;
``spine_rooms`` those of the floor plan in which the spine is; ``arrows`` the pairs of rooms of
which one imports the other (``floor_arrows``: of what ``ORDER`` names, without folders in others).
The spine, the wings ``serving``, ``envs`` and ``games``, and the rest are as ``house_parts.py``
says; ``core_lines`` are those of all but the optional rooms. ``shared_names`` are the names of
classes that stand in two modules. ``files_*`` are entered on a way, see ``house_ways.py``;
``*_above_run`` leaves out the helpers of ``run/``, which are called everywhere, and of which a busy
machine may call one more. The last line is JSON.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import combinations
from pathlib import Path

from benchmarks.house_parts import lines_of, part, shared_names, sizes
from benchmarks.house_picture import draw

ROOT = Path(__file__).parents[1]

FLOORS = {
    "words and tools": ("errors", "rollout", "config", "run"),
    "data and models": ("vision", "data", "models", "algos"),
    "who writes, who grades": ("engines", "agents", "rewards"),
    "sync, collect, learn": ("sync", "collect", "learn"),
    "Lightning's faces": ("module", "datamodule"),
    "around them": ("callbacks", "extend", "cli", "__main__"),
    "wings, and rooms that may be left out": ("serving", "envs", "games", "convert", "verifiers"),
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
    """Dotted names of a checkout's modules; ``callbacks/`` is ``lightning_rl.callbacks``."""
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
    """Every import of one of the modules by another."""
    return {
        Arrow(name, imported)
        for name, path in modules.items()
        for target in _imports(ast.parse(path.read_text("utf-8")))
        if (imported := _module(target, modules)) is not None and imported != name
    }


def _imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports; the library has absolute imports only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(name: str, modules: Iterable[str]) -> str | None:
    """The module that a dotted name is, or is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def room(module: str) -> str:
    """The folder of the library that a module is in, or its own name at the root."""
    return module.split(".")[1] if "." in module else module


DOORS = {"lightning_rl", "lightning_rl.__main__"}
"""What is no room: the package itself, and its command."""


def folder_of(module: str, path: Path) -> str:
    """The folder that a module is in, however deep; at the root the module itself."""
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return module if folder == "lightning_rl" else folder


def back_up(found: Iterable[Arrow], order: tuple[str, ...] = ORDER) -> list[Arrow]:
    """Arrows from a room to one that does not stand before it; the package itself may be named.

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
    """Pairs of folders that import each other; files at the root are none."""
    pairs = {
        (room(a.importer), room(a.imported))
        for a in found
        if a.importer.count(".") > 1 and a.imported.count(".") > 1
    }
    rooms = sorted({name for pair in pairs for name in pair})
    return [(a, b) for a, b in combinations(rooms, 2) if {(a, b), (b, a)} <= pairs]


def circles(found: Iterable[Arrow]) -> list[list[str]]:
    """Groups of files of which each reaches each other by imports (Tarjan's components)."""
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


def measure(root: Path) -> dict[str, int]:
    """The counts of a checkout."""
    library = modules_of(root, "lightning_rl", "callbacks")
    stubs = list((root / "lightning_rl").rglob("*.pyi"))
    tests = list((root / "tests").rglob("*.py"))
    found = arrows(library)
    inside = [a for a in found if not {a.importer, a.imported} & DOORS]
    folders = {(room(a.importer), room(a.imported)) for a in inside}
    rooms = {name: folder_of(name, path) for name, path in library.items()}
    between = {(rooms[a.importer], rooms[a.imported]) for a in found}
    return {
        "rooms": len({*rooms.values()} - DOORS),
        "spine_rooms": len({room(name) for name in library if part(name) == "spine"} - DOORS),
        "arrows": len({(a, b) for a, b in between if a != b and not {a, b} & DOORS}),
        "files": len(library) + len(stubs),
        "lines": lines_of([*library.values(), *stubs]),
        "root_files": len(list((root / "lightning_rl").glob("*.py"))),
        "folders": len({p.parent for p in library.values()}),
        "longest_file": max(lines_of([p]) for p in library.values()),
        "floor_arrows": len({(a, b) for a, b in folders if a != b}),
        "both_way_pairs": len(both_ways(found)),
        "circles": len(circles(found)),
        "circles_in_benchmarks": len(circles(arrows(modules_of(root, "benchmarks")))),
        "test_files": len(tests),
        "test_lines": lines_of(tests),
        "shared_names": len(shared_names(library, root)),
        **sizes(library),
    }


def captions(root: Path) -> dict[str, str]:
    """What each room is for: the first sentence of its docstring."""
    found = {}
    for name in ORDER:
        folder = root / ("callbacks" if name == "callbacks" else f"lightning_rl/{name}")
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0]
        found[name] = first.partition(". ")[0].rstrip(".").replace("``", "")
    return found


def checkout(commit: str, folder: str) -> Path:
    """The files of a commit, unpacked into a folder."""
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return Path(folder)


def ways(root: Path) -> dict[str, int]:
    """How many files are entered on each way; prints which.

    Raises:
        RuntimeError: if the trainings that go them fail.
    """
    command = [sys.executable, str(Path(__file__).with_name("house_ways.py"))]
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    done = subprocess.run(command, cwd=root, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"house_ways.py failed in {root}:\n{done.stderr[-3000:]}")
    counts: dict[str, int] = {}
    for name, files in json.loads(done.stdout.splitlines()[-1]).items():
        print(f"{name}: {' > '.join(files)}")
        above = [file for file in files if not file.startswith("run/")]
        counts |= {f"files_{name}": len(files), f"files_{name}_above_run": len(above)}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", help="a commit; default: the files as they are")
    parser.add_argument("--no-ways", action="store_true", help="do not run it")
    parser.add_argument("--picture", type=Path, help="write the floor plan there, as SVG")
    args = parser.parse_args()
    if args.picture is not None:
        args.picture.write_text(draw(FLOORS, captions(ROOT)))
    with tempfile.TemporaryDirectory() as folder:
        root = ROOT if args.at is None else checkout(args.at, folder)
        counts = measure(root)
        library = modules_of(root, "lightning_rl", "callbacks")
        for name, places in shared_names(library, root).items():
            print(f"{name} is a class in {', '.join(places)}")
        if not args.no_ways:
            counts |= ways(root)
    for name, count in counts.items():
        print(f"{name:>28} {count}")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
