"""Test the floor plan: who may import whom, and a picture of it that is the code's."""

from pathlib import Path

import pytest

from benchmarks.house.counts import captions
from benchmarks.house.modules import (
    DOORS,
    FLOORS,
    ORDER,
    ROOT,
    Arrow,
    arrows,
    back_up,
    both_ways,
    circles,
    folder_of,
    modules_of,
    room,
)
from benchmarks.house.parts import PARTS, lines_of, part, shared_names, sizes
from benchmarks.house.picture import draw


@pytest.fixture(scope="module")
def library():
    return arrows(modules_of(ROOT, "lightning_rl", "callbacks"))


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "lightning_rl" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_import_runs_back_up(library):
    assert [str(arrow) for arrow in back_up(library)] == []


def test_no_folders_import_each_other_and_no_files_in_a_circle(library):
    assert both_ways(library) == []
    assert circles(library) == []
    assert circles(arrows(modules_of(ROOT, "benchmarks"))) == []


SEEN = {
    "agents": 8, "algos": 7, "callbacks": 8, "cli": 4, "collect": 18, "config": 10, "convert": 0,
    "data": 28, "engines": 18, "envs": 13, "extend": 0, "games": 0, "learn": 22, "models": 27,
    "openenv": 0, "rewards": 8, "run": 33, "serving": 4, "sync": 4, "verifiers": 0, "vision": 11,
}  # fmt: skip
"""Number of modules of each room that others may import: as now, and some day at most eight."""


@pytest.mark.parametrize("name", SEEN)
def test_no_room_shows_more_modules_to_others(library, name):
    """Import from a module that is seen already, or hide another and lower the number."""
    seen = {a.imported for a in library if room(a.imported) == name != room(a.importer)}
    assert len(seen) <= SEEN[name], sorted(seen)


def test_every_room_is_counted():
    rooms = {path.parent.name for path in (ROOT / "lightning_rl").glob("*/__init__.py")}
    assert rooms == set(SEEN)


def test_no_test_module_imports_another():
    """What two of them need is in tests/support."""
    found = [
        f"{arrow.importer} imports {arrow.imported}"
        for arrow in arrows(modules_of(ROOT, "tests"))
        if arrow.imported.rpartition(".")[2].startswith("test_")
    ]
    assert found == []


def test_at_the_root_are_the_words_and_the_faces():
    files = {path.name for path in (ROOT / "lightning_rl").glob("*.py")}
    faces = {"errors.py", "rollout.py", "module.py", "datamodule.py"}
    assert files == {"__init__.py", "__main__.py", *faces}
    folders = {path.parent.name for path in (ROOT / "lightning_rl").glob("*/__init__.py")}
    assert {name.removesuffix(".py") for name in files | folders} - {"__init__"} == set(ORDER)


def test_the_picture_is_of_this_code():
    picture = (ROOT / "docs/images/house.svg").read_text("utf-8")
    assert picture == draw(FLOORS, captions(ROOT)), (
        "python -m benchmarks.house --picture docs/images/house.svg"
    )
    assert all(captions(ROOT).values())


def test_imports_are_found_wherever_they_stand(tmp_path):
    root = write(
        tmp_path,
        models__policy="from lightning_rl.run import dist\n",
        run__dist="def f():\n    from lightning_rl.models.policy import Policy\n",
        run__loop="if TYPE_CHECKING:\n    import lightning_rl.data.packing\n",
        data__packing="",
    )
    found = arrows(modules_of(root, "lightning_rl"))
    assert [str(arrow) for arrow in back_up(found)] == [
        "lightning_rl.run.dist imports lightning_rl.models.policy",
        "lightning_rl.run.loop imports lightning_rl.data.packing",
    ]
    assert both_ways(found) == [("models", "run")]
    assert circles(found) == [["lightning_rl.models.policy", "lightning_rl.run.dist"]]


def test_only_the_link_is_left_out_not_every_file_called_callbacks(tmp_path):
    root = write(tmp_path, games__callbacks="", callbacks__guards="")
    (root / "callbacks").mkdir()
    (root / "callbacks" / "guards.py").write_text("")
    assert modules_of(root, "lightning_rl", "callbacks") == {
        "lightning_rl.games.callbacks": root / "lightning_rl/games/callbacks.py",
        "lightning_rl.callbacks.guards": root / "callbacks/guards.py",
    }


def test_circles_are_told_apart():
    names = {"a": "b", "b": "c", "c": "a", "d": "e", "e": "d", "f": "a"}
    assert circles(Arrow(a, b) for a, b in names.items()) == [["a", "b", "c"], ["d", "e"]]


def test_a_new_room_needs_a_place():
    arrow = Arrow("lightning_rl.garage.car", "lightning_rl.run.dist")
    with pytest.raises(ValueError, match="garage has no place in ORDER"):
        back_up([arrow])


def test_every_file_is_in_one_part_wherever_it_stands():
    places = {
        "envs.gym": "envs",
        "algos.td": "envs",
        "envs.networks.bodies": "envs",
        "algos.tree": "spine",  # not algos.td, nor a wing's
        "networks.space": "envs",
        "envs.game_module": "games",
        "games.staged.trainer": "games",
        "staged": "games",
        "offline.solo": "games",
        "learn.dpo": "offline",
        "cli.convert.verl": "optional",
        "cli.view.page": "view",
        "cli.check.command": "check",
        "cli.audit.examination": "rerun",
        "cli.app": "spine",
        "data.rollouts.pictures": "vision",
        "module": "spine",
    }
    assert {name: part(f"lightning_rl.{name}") for name in places} == places
    library = modules_of(ROOT, "lightning_rl", "callbacks")
    found = sizes(library)
    lines = {name: found[f"{name}_lines"] for name in ("spine", *PARTS)}
    assert all(lines.values())
    assert sum(lines.values()) == lines_of(library.values())
    assert found["core_lines"] == sum(lines.values()) - lines["optional"]


def test_a_folder_in_a_folder_is_a_room():
    library = modules_of(ROOT, "lightning_rl", "callbacks")
    rooms = {folder_of(name, path) for name, path in library.items()} - DOORS
    assert {f"lightning_rl.{name}" for name in ("module", "callbacks", "cli", "cli.rerun")} <= rooms
    assert not {"lightning_rl", "lightning_rl.cli.main"} & rooms


def test_names_that_two_classes_share_are_found_with_their_places(tmp_path):
    root = write(
        tmp_path,
        data__calls="class Call:\n    class Row: ...\nclass _Own: ...\n",
        run__desk="\nclass Call: ...\nclass _Own: ...\n",
        run__loop="def f():\n    class Row: ...\n",
    )
    assert shared_names(modules_of(root, "lightning_rl"), root) == {
        "Call": ["lightning_rl/data/calls.py:1", "lightning_rl/run/desk.py:2"],
        "Row": ["lightning_rl/data/calls.py:2", "lightning_rl/run/loop.py:2"],
    }
