"""Measure the parts of the house, and find the names that several classes share."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PARTS = {
    "serving": ("serving",),
    "envs": ("envs", "networks", "algos.steps", "algos.step_kl", "algos.td"),
    "games": (
        "games",
        "protocols",
        "roles",
        "staged",
        "algos.games",
        "algos.game_moves",
        "algos.game_scores",
        "algos.game_steps",
        "algos.game_updates",
        "envs.game_module",
        "offline.solo",
        "offline.labelled",
        "offline.label_heads",
    ),
    "offline": ("offline", "learn.sft", "learn.dpo", "learn.recorded"),
    "view": ("view", "cli.view"),
    "check": ("cli.check", "cli.compare", "cli.rehearse"),
    "rerun": ("cli.rerun", "cli.audit", "cli.bisect", "cli.pack"),
    "vision": ("vision", "data.pictured", "data.rollouts.pictures"),
    "optional": ("convert", "cli.convert", "verifiers", "serving.verifiers", "openenv"),
}
"""What is in which part, by folders and files of ``lightning_rl/``; all else is the spine.

The longest name that fits decides. So a file of a wing counts as the wing's also while it is still
on a shelf of the spine.
"""


def part(module: str) -> str:
    """Return the part that a module is in."""
    inside = module.partition(".")[2]
    fitting = [
        (len(name), part)
        for part, names in PARTS.items()
        for name in names
        if f"{inside}.".startswith(f"{name}.")
    ]
    return max(fitting)[1] if fitting else "spine"


def sizes(library: Mapping[str, Path]) -> dict[str, int]:
    """Count files and lines of each part; ``core_lines`` are those of all but the optional one."""
    found: dict[str, int] = {"core_lines": 0}
    for name in ("spine", *PARTS):
        paths = [path for module, path in library.items() if part(module) == name]
        found |= {f"{name}_files": len(paths), f"{name}_lines": lines_of(paths)}
        found["core_lines"] += 0 if name == "optional" else found[f"{name}_lines"]
    return found


def lines_of(paths: Iterable[Path]) -> int:
    """Count all lines: code, comments, docstrings and blank ones."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def shared_names(library: Mapping[str, Path], root: Path) -> dict[str, list[str]]:
    """Return public names that classes of several modules have, and where they are defined."""
    places: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for module, path in library.items():
        for node in _public_classes(ast.parse(path.read_text("utf-8"))):
            places[node.name][module] = f"{path.relative_to(root)}:{node.lineno}"
    return {name: [*of.values()] for name, of in sorted(places.items()) if len(of) > 1}


def _public_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node
