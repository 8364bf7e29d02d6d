"""Count a checkout, and tell the purpose of each of its rooms."""

import ast
import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

from benchmarks.house.modules import (
    DOORS,
    ORDER,
    ROOT,
    arrows,
    both_ways,
    circles,
    folder_of,
    modules_of,
    room,
)
from benchmarks.house.parts import lines_of, part, shared_names, sizes


def measure(root: Path) -> dict[str, int]:
    """Return the counts of a checkout."""
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
    """Return the purpose of each room: the first sentence of its docstring."""
    found = {}
    for name in ORDER:
        folder = root / ("callbacks" if name == "callbacks" else f"lightning_rl/{name}")
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0]
        found[name] = first.partition(". ")[0].rstrip(".").replace("``", "")
    return found


def checkout(commit: str, folder: str) -> Path:
    """Unpack the files of a commit into a folder."""
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return Path(folder)


def ways(root: Path) -> dict[str, int]:
    """Count the files that are entered on each way, and print which they are.

    Raises:
        RuntimeError: if the trainings that go them fail.
    """
    command = [sys.executable, str(Path(__file__).with_name("ways.py"))]
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    done = subprocess.run(command, cwd=root, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ways.py failed in {root}:\n{done.stderr[-3000:]}")
    counts: dict[str, int] = {}
    for name, files in json.loads(done.stdout.splitlines()[-1]).items():
        print(f"{name}: {' > '.join(files)}")
        above = [file for file in files if not file.startswith("run/")]
        counts |= {f"files_{name}": len(files), f"files_{name}_above_run": len(above)}
    return counts
