"""Test what installed packages add: it is found by metadata, and loaded when it is named."""

import subprocess
import sys

import pytest

from lightning_rl.cli import find_command, main, usage
from lightning_rl.config import names, packages
from lightning_rl.config.hints import import_object, named_class
from lightning_rl.errors import ConfigError
from lightning_rl.extend import Agent, GroupFilter


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put packages where installed ones are: their code, and the metadata that pip writes."""
    place = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(place))
    packages.added.cache_clear()

    def put(name, code, **groups):
        metadata = place / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (place / f"{name}.py").write_text(code)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[lightning_rl.{group}]\n{points}\n" for group, points in groups.items()]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return place

    yield put
    packages.added.cache_clear()


FILTER = """
from lightning_rl.extend import GroupFilter

class Longest(GroupFilter):
    def keep(self, group):
        return True
"""
COMMAND = """
from lightning_rl.extend import Command
COMMAND = Command("greeting", "say hello", imports=False)

def main(arguments):
    print("hello", *arguments)
    return 3
"""


def test_a_class_that_a_package_adds_is_known_by_its_name(install):
    install("filters", FILTER, classes="Longest = filters:Longest")
    names.load_all()
    assert named_class("Longest", [GroupFilter]) is sys.modules["filters"].Longest
    with pytest.raises(ConfigError, match="no Agent is called 'Longest'"):
        named_class("Longest", [Agent])


def test_a_command_that_a_package_adds_is_listed_and_run(install, capsys):
    install("greeting", COMMAND, commands="greet = greeting:COMMAND")
    assert "\n  greet      say hello\n" in usage()
    assert main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert main(["gret"]) == 2
    assert "did you mean greet?" in capsys.readouterr().err


def test_a_package_that_fails_stops_only_who_names_its_parts(install):
    install("broken", "import nowhere", classes="Lost = broken:Lost", commands="lost = broken:C")
    names.load_all()
    reason = r"'Lost' of the package broken \(broken:Lost\) cannot be imported: ModuleNotFound"
    with pytest.raises(ConfigError, match=reason):
        named_class("Lost", [GroupFilter])
    assert "\n  lost       'lost' of the package broken (broken:C) cannot be imported" in usage()
    with pytest.raises(
        ConfigError, match=r"cannot be imported: .*'nowhere'; reinstall or uninstall the package"
    ):
        find_command("lost")


def test_what_is_no_command_or_called_otherwise_is_refused(install):
    points = {"commands": "odd = odd:main", "classes": "Other = odd:Longest"}
    install("odd", f"{FILTER}\ndef main(arguments): ...", **points)
    with pytest.raises(ConfigError, match="odd:main must be a Command, not a function"):
        find_command("odd")
    with pytest.raises(
        ConfigError, match="odd:Longest is registered as 'Other', which is not its name"
    ):
        named_class("Other", [GroupFilter])


@pytest.mark.parametrize(
    ("group", "ours", "name"), [("classes", names.MODULE_OF, "GRPO"), ("commands", ["fit"], "fit")]
)
def test_no_package_takes_a_name_that_is_there(install, group, ours, name):
    install("thief", "", **{group: f"{name} = thief:X"})
    with pytest.raises(ConfigError, match=f"thief adds '{name}' .* which lightning_rl has already"):
        packages.added(f"lightning_rl.{group}", frozenset(ours))


def test_two_packages_do_not_add_one_name(install):
    for name in ("one", "two"):
        install(name, FILTER, classes=f"Longest = {name}:Longest")
    with pytest.raises(ConfigError, match=r"the package two adds 'Longest' .* which one has alre"):
        names.load_all()


def test_of_a_package_that_is_there_twice_the_first_counts(install, tmp_path, monkeypatch):
    install("filters", FILTER, classes="Longest = filters:Longest")
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    newer = tmp_path / "first" / "filters-2.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: filters\nVersion: 2.0\n")
    assert "Longest" not in names.added()


def test_a_strangers_folder_adds_nothing(install, tmp_path, monkeypatch):
    place = install("evil", "open('ran', 'w')", classes="Evil = evil:Evil", commands="e = evil:E")
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend("")
    names.load_all()
    assert "\n  e " not in usage()
    assert not (place / "ran").exists()


def test_what_an_installation_is_without_is_told_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(packages, "added", lambda group, ours: {})
    monkeypatch.setitem(packages.OPTIONAL_CLASSES, "Poet", "lightning_rl.poets")
    told = "an optional part that is not installed here: in a checkout .* `make setup`"
    with pytest.raises(ConfigError, match=f"^Poet is not installed; .*lightning_rl.poets, {told}"):
        named_class("Poet", [Agent])
    with pytest.raises(
        ConfigError, match=f"^'lightning_rl.poets.Poet' is not installed; .* {told}"
    ):
        import_object("lightning_rl.poets.Poet")
    with pytest.raises(ConfigError, match=f"no command 'convert'; it is in .*{told}"):
        find_command("convert")
    assert main(["convert"]) == 2
    assert "lightning_rl.convert, an optional part" in capsys.readouterr().err
    assert "\n  convert" not in usage()


def test_importing_the_library_reads_no_metadata():
    code = "import sys, lightning_rl, lightning_rl.cli; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
