"""Test one spine and its wings: who may import whom across them, and inside of a wing."""

import pytest

from benchmarks.house.modules import ROOT, Arrow, arrows, modules_of

WINGS = {"serving": (), "envs": (), "games": ("serving", "envs")}
"""Each wing, and the wings that it may import. All may import the spine, which imports none."""
OPTIONAL = {"convert": (), "verifiers": ("serving",), "openenv": ("serving",)}
"""Rooms that could leave for a package of their own, with the wings that they may import.

Nobody imports them.
"""
INSIDE = {
    "envs": ("algos", "networks"),
    "games": ("algos", "protocols", "roles", "staged"),
}
"""Parts of a wing that import those before them, and nothing else of their wing."""
TOOLS = {
    "check": ("rehearse",),
    "compare": (),
    "rehearse": ("compare",),
    "rerun": ("audit", "bisect", "pack"),
    "audit": (),
    "bisect": (),
    "pack": (),
    "view": ("compare",),
}
"""Commands' folders in ``cli``, and those of them that may import each; nothing else does."""


@pytest.fixture(scope="module")
def library() -> set[Arrow]:
    return arrows(modules_of(ROOT, "lightning_rl", "callbacks"))


def room(module: str) -> str:
    """Return the first folder, or file, below the package."""
    return module.split(".")[1] if "." in module else module


def part(module: str) -> tuple[str, str]:
    """Return a module's room, and its folder or file in there; "" is the room itself."""
    _, _, inside = module.removeprefix("lightning_rl.").partition(".")
    return room(module), inside.partition(".")[0]


def not_allowed(found: set[Arrow]) -> list[str]:
    """Return arrows into a wing or an optional room that do not come from where they may."""
    wrong = []
    for arrow in sorted(found, key=str):
        above, below = room(arrow.importer), room(arrow.imported)
        if above == below or below not in (*WINGS, *OPTIONAL):
            continue
        if below not in (WINGS | OPTIONAL).get(above, ()):
            wrong.append(str(arrow))
    return wrong


def into_tools(found: set[Arrow]) -> list[str]:
    """Return arrows into a command's folder that come from elsewhere than they may."""
    wrong = []
    for arrow in sorted(found, key=str):
        (_, above), (other, below) = part(arrow.importer), part(arrow.imported)
        inside = room(arrow.importer) == "cli" and above in (below, *TOOLS.get(below, ()))
        if other == "cli" and below in TOOLS and not inside:
            wrong.append(str(arrow))
    return wrong


def inside_out(found: set[Arrow]) -> list[str]:
    """Return arrows from a wing's part to one that does not stand before it, or to no part."""
    wrong = []
    for arrow in sorted(found, key=str):
        wing, above = part(arrow.importer)
        other, below = part(arrow.imported)
        parts = INSIDE.get(wing, ())
        if other != wing or above not in parts or below in (above, ""):
            continue
        if below not in parts[: parts.index(above)]:
            wrong.append(str(arrow))
    return wrong


def test_the_spine_imports_no_wing(library):
    assert not_allowed(library) == []


def test_nothing_imports_a_command(library):
    assert into_tools(library) == []


def test_inside_of_the_wings_imports_run_one_way_too(library):
    assert inside_out(library) == []


@pytest.mark.parametrize("name", [*WINGS, *OPTIONAL])
def test_all_of_them_are_there(name):
    assert (ROOT / "lightning_rl" / name / "__init__.py").exists()


@pytest.mark.parametrize(
    ("check", "above", "below", "allowed"),
    [
        (into_tools, "cli", "cli.check.command", False),
        (into_tools, "cli.app", "cli.view.page", False),
        (into_tools, "callbacks.report", "cli.rerun.run", False),
        (into_tools, "games.staged.command", "cli.check.doctor", False),
        (into_tools, "cli.rerun.run", "cli.audit.examination", False),
        (into_tools, "cli.rehearse", "cli.compare.runs", False),
        (into_tools, "cli.compare.report", "cli.view.page", True),
        (into_tools, "cli.audit.again", "cli.rerun.run", True),
        (into_tools, "cli.check.mesh", "cli.check.card", True),
        (into_tools, "cli.check.command", "cli.app", True),
        (not_allowed, "collect.loader", "envs.base", False),
        (not_allowed, "cli.check", "games.staged.command", False),
        (not_allowed, "module", "games.module", False),
        (not_allowed, "envs.base", "games.module", False),
        (not_allowed, "games.module", "envs.base", True),
        (not_allowed, "envs.base", "learn.base", True),
        (not_allowed, "collect.stats", "serving.results", False),
        (not_allowed, "envs.base", "serving.session", False),
        (not_allowed, "games.protocols.agent", "serving.session", True),
        (not_allowed, "verifiers.agent", "serving.session", True),
        (not_allowed, "openenv.server", "serving.variables", True),
        (not_allowed, "openenv.agent", "verifiers.hosting", False),
        (not_allowed, "convert.main", "serving.session", False),
        (not_allowed, "games.staged.command", "cli.process", True),
        (not_allowed, "cli", "convert.main", False),
        (not_allowed, "games.roles.module", "verifiers.agent", False),
        (not_allowed, "convert.main", "cli.process", True),
        (not_allowed, "convert.main", "convert.trl", True),
        (inside_out, "envs.networks.agent", "envs.base", False),
        (inside_out, "envs.algos.steps", "envs.networks.agent", False),
        (inside_out, "envs.networks.agent", "envs.algos.steps", True),
        (inside_out, "games.roles.game", "games.protocols.base", True),
        (inside_out, "games.protocols.base", "games.staged.trainer", False),
        (inside_out, "envs.base", "envs.networks.agent", True),
    ],
)
def test_arrows_that_are_planted_are_found(check, above, below, allowed):
    arrow = Arrow(f"lightning_rl.{above}", f"lightning_rl.{below}")
    assert check({arrow}) == ([] if allowed else [str(arrow)])
