"""Test that setup.cfg, the disk, the pins, and a built wheel and sdist agree with each other."""

import configparser
import os
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightning_rl.cli.quickstart import COPIED
from tests.support.packaged import (
    PACKAGE_FOLDERS,
    ROOT,
    data_on_disk,
    modules_on_disk,
    recipes_on_disk,
)
from tests.support.reports import git

RECIPES = "lightning_rl.recipes"
"""The place of recipes/ in a wheel: files to copy, of which nothing is imported there."""


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_package_list_names_every_folder_with_python_files(config: configparser.ConfigParser):
    listed = set(lines(config["options"]["packages"])) - {RECIPES}
    assert listed == {str(Path(m).parent).replace("/", ".") for m in modules_on_disk()}


def test_package_data_names_every_other_file(config: configparser.ConfigParser):
    packaged = set()
    for package, patterns in config["options.package_data"].items():
        if package == RECIPES:
            continue
        folder = ROOT / package.replace(".", "/")
        for pattern in patterns.split(","):
            packaged |= {p.relative_to(ROOT).as_posix() for p in folder.glob(pattern.strip())}
    assert data_on_disk() == packaged


def test_recipes_travel_whole(config: configparser.ConfigParser):
    patterns = config["options.package_data"][RECIPES].split(",")
    packaged = {p for pattern in patterns for p in (ROOT / "recipes").glob(pattern.strip())}
    assert {p.relative_to(ROOT).as_posix() for p in packaged} == recipes_on_disk()
    assert {path.suffix for path in packaged} == COPIED


def test_messages_and_pages_name_installs_that_work(config: configparser.ConfigParser):
    """Nothing is on an index under our name; what is named is one of the declared requirements."""
    extras = "\n".join(config["options.extras_require"].values())
    declared = set(lines(extras))
    named = set()
    for folder in ("lightning_rl", "callbacks", "recipes", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".yaml"):
                text = re.sub(r'"\n\s+f?"', "", path.read_text())
                found = re.findall(r"pip install ((?:'[^']+' ?)+)", text)
                named |= {name for names in found for name in re.findall(r"'([^']+)'", names)}
                assert not re.search(r"pip install [\"']?lightning_rl", text), path
    # These are of environments of their own: the first two are checked in test_doctor.py.
    named -= {"verifiers>=0.4", "{wanted}", "ray[default]>=2.50,<3"}
    assert len(named) >= 6
    assert named - declared == set()


def test_every_package_has_an_init():
    modules = modules_on_disk()
    assert {str(Path(m).parent / "__init__.py") for m in modules} <= modules


def test_callbacks_is_one_folder_under_two_names(config: configparser.ConfigParser):
    link = ROOT / "lightning_rl" / "callbacks"
    # Relative, or a clone elsewhere would point at this machine's folder.
    assert os.readlink(link) == "../callbacks"
    declared = dict(line.split(" = ") for line in lines(config["options"]["package_dir"]))
    assert declared == PACKAGE_FOLDERS | {RECIPES: "recipes"}


def requirement_sets(config: configparser.ConfigParser, backend: str) -> list[Requirement]:
    extras = config["options.extras_require"]
    text = config["options"]["install_requires"]
    for extra in (backend, "dev", "docs", "recipes"):
        text += "\n" + extras[extra]
    return [Requirement(line) for line in lines(text) if not line.startswith("#")]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_pins_lie_in_the_declared_ranges(config: configparser.ConfigParser, backend: str):
    pins: dict[str, set[str]] = {}
    for line in lines((ROOT / "install" / f"{backend}-constraints.txt").read_text()):
        pin = Requirement(line)
        (version,) = pin.specifier
        assert version.operator == "=="
        pins.setdefault(canonicalize_name(pin.name), set()).add(version.version)
    for required in requirement_sets(config, backend):
        versions = pins.get(canonicalize_name(required.name), set())
        assert versions, f"{required.name} is not pinned for {backend}; run make lock"
        for version in versions:
            assert required.specifier.contains(version, prereleases=True), (required, version)


def test_cpu_set_has_neither_cuda_nor_torchvision():
    overrides = lines((ROOT / "install" / "cpu-overrides.txt").read_text())
    dropped = [Requirement(line) for line in overrides if not line.startswith("#")]
    assert {r.name for r in dropped} == {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert not any(r.marker.evaluate() for r in dropped if r.marker), "an override applies here"
    pinned = {
        Requirement(line).name
        for line in lines((ROOT / "install" / "cpu-constraints.txt").read_text())
    }
    assert not pinned & {r.name for r in dropped}
    assert not [name for name in pinned if name.startswith("nvidia-")]


LARGEST = 1_000_000
"""Bytes of a file. Whoever clones the repository pays for each for ever, also once it is gone."""


def test_the_repository_holds_no_binaries_but_the_pictures_of_the_docs():
    listed = git("ls-files", "-z")
    if listed is None:
        pytest.skip("not a git checkout: nothing says which files belong to it")
    files = [ROOT / name for name in listed.split("\0") if name]
    files = [file for file in files if file.is_file() and not file.is_symlink()]
    assert ROOT / "setup.cfg" in files
    assert [str(file) for file in files if file.stat().st_size > LARGEST] == []
    pictures = ROOT / "docs" / "images"
    binaries = [file for file in files if b"\0" in file.read_bytes()]
    assert [str(file) for file in binaries if file.parent != pictures] == []
    assert {file.suffix for file in binaries} <= {".png"}
