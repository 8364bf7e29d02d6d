"""Test that a built wheel and sdist hold what is on the disk."""

import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.support.packaged import ROOT, data_on_disk, modules_on_disk, recipes_on_disk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Return file names in a wheel and an sdist built from a copy of the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("lightning_rl", "callbacks", "recipes"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    # The build backend itself, as pip calls it, without pip's download of setuptools.
    build = "from setuptools import build_meta as b; print(b.build_wheel('.'), b.build_sdist('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    wheel, sdist = done.stdout.splitlines()[-1].split()
    with zipfile.ZipFile(copy / wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(copy / sdist) as archive:
        in_sdist = archive.getnames()
    return in_wheel, in_sdist


def test_wheel_holds_every_module_once(built: tuple[list[str], list[str]]):
    in_wheel, _ = built
    recipes = [name for name in in_wheel if name.startswith("lightning_rl/recipes/")]
    assert sorted(recipes) == sorted(f"lightning_rl/{name}" for name in recipes_on_disk())
    modules = [name for name in in_wheel if name.endswith(".py") and name not in recipes]
    assert sorted(modules) == sorted(modules_on_disk())
    assert set(in_wheel) >= data_on_disk() >= {"lightning_rl/py.typed", "lightning_rl/__init__.pyi"}
    view = ROOT / "lightning_rl" / "cli" / "view"
    assets = {path.name for path in view.iterdir() if path.is_file()}
    assert {name.split("/")[-1] for name in in_wheel if "/view/" in name} >= assets
    assert "lightning_rl-0.1.0.dist-info/licenses/LICENSE" in in_wheel


def test_sdist_holds_callbacks_where_setup_cfg_looks(built: tuple[list[str], list[str]]):
    _, in_sdist = built
    for module in modules_on_disk():
        source = module.replace("lightning_rl/callbacks/", "callbacks/")
        assert f"lightning_rl-0.1.0/{source}" in in_sdist
    assert {f"lightning_rl-0.1.0/{name}" for name in recipes_on_disk()} <= set(in_sdist)
