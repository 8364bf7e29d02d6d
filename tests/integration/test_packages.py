"""Packages that add commands and classes, as pip installs them; ours without its optional parts."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta as b; print(b.build_wheel('.'))"
METADATA = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('.')"
LEAVING = {
    "convert": [
        "tests/support/hostile/conversions.py",
        "tests/support/hostile/conversion_scripts.py",
    ],
    "verifiers": ["recipes/hangman", "install/verifiers.txt"],
    "openenv": ["recipes/openenv_guess", "install/openenv.txt"],
}
"""Optional rooms, and what leaves with each besides the folders of its name."""


def python(*arguments, at, path=()):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=at, env=env, capture_output=True, text=True, check=False)


def succeeded(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the package of docs/extend/package.md, built as a wheel and installed by pip."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    text = "".join(
        (ROOT / f"docs/extend/{page}.md").read_text(encoding="utf-8")
        for page in ("filter", "package")
    )
    files = re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
    assert {name for name, _ in files} == {"my_filter.py", "my_count.py", "pyproject.toml"}
    for name, text in files:
        (source / name).write_text(text)
    wheel = succeeded(python("-c", BUILD, at=source)).splitlines()[-1]
    options = ("--no-index", "--no-deps", "--quiet", "--target", target)
    succeeded(python("-m", "pip", "install", *options, source / wheel, at=source))
    return [target]


def test_a_package_adds_its_command(installed, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n" * 7)
    ours = ("-m", "lightning_rl")
    said = succeeded(python(*ours, "--help", at=tmp_path, path=installed))
    assert "\n  count      count the lines" in said
    assert succeeded(python(*ours, "count", "rows.jsonl", at=tmp_path, path=installed)) == "7\n"
    # Neither is there without the package.
    assert "count" not in succeeded(python(*ours, "--help", at=tmp_path))
    assert "no command 'count'" in python(*ours, "count", at=tmp_path).stderr


CONFIG = {
    "model": {"class_path": "PolicyModule", "init_args": {"model": "gpt2"}},
    "data": {
        "class_path": "RLDataModule",
        "init_args": {
            "train_prompts": "rows.jsonl",
            "rewards": ["lightning_rl.EnvironmentReward"],
            "selection": {"filters": [{"class_path": "NotAllCut", "init_args": {"most": 0.25}}]},
        },
    },
}


def test_a_package_adds_its_class(installed, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    fit = ("-m", "lightning_rl", "fit", "--config", "run.yaml")
    printed = succeeded(python(*fit, "--print_config", at=tmp_path, path=installed))
    told = yaml.safe_load(printed)
    [found] = told["data"]["init_args"]["selection"]["filters"]
    assert found == {"class_path": "my_filter.NotAllCut", "init_args": {"most": 0.25}}
    said = python(*fit, "--trusted_only", at=tmp_path, path=installed).stderr
    assert "'my_filter.NotAllCut' is not among the trusted modules" in said


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    """Return a copy of the checkout without the optional rooms, and its metadata."""
    copy = tmp_path_factory.mktemp("rest")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    leaving = [path for paths in LEAVING.values() for path in paths]
    for name in tracked:
        path = Path(name)
        gone = not LEAVING.keys().isdisjoint(path.parts) or any(
            path.is_relative_to(other) for other in leaving
        )
        if not gone and (ROOT / path).exists():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path, follow_symlinks=False)
    setup = configparser.ConfigParser()
    setup.read(copy / "setup.cfg")
    for section, key in (
        ("options", "packages"),
        ("options.entry_points", "lightning_rl.commands"),
        ("options.entry_points", "lightning_rl.classes"),
    ):
        lines = setup[section][key].splitlines()
        setup[section][key] = "\n".join(
            line
            for line in lines
            if not re.search(r"lightning_rl\.(convert|verifiers|openenv)\b", line)
        )
    for room in LEAVING:
        setup["options.package_data"].pop(f"lightning_rl.{room}", None)
    with (copy / "setup.cfg").open("w") as file:
        setup.write(file)
    succeeded(python("-c", METADATA, at=copy))
    return copy


def test_without_the_optional_parts_nothing_names_their_modules(rest):
    code = [path for path in rest.rglob("*.py") if not path.is_relative_to(rest / "build")]
    assert len(code) > 500
    imports = re.compile(r"^\s*(from|import) [\w.]*\b(convert|verifiers|openenv)\b", re.MULTILINE)
    assert [str(path) for path in code if imports.search(path.read_text())] == []


LOAD = """
import lightning_rl, sys
from pathlib import Path
from importlib import import_module
from lightning_rl.config import names
assert Path(lightning_rl.__file__).is_relative_to(sys.argv[1]), lightning_rl.__file__
names.load_all()
from lightning_rl.cli import COMMANDS
for command in COMMANDS.values():
    import_module(command.module)
print(len(names.MODULE_OF), *names.added())
"""


# No .pth file is read without site, so not the one by which an editable install finds all of it.
REST = "-S"


def beside(rest):
    return [rest, sysconfig.get_path("purelib")]


def test_without_the_optional_parts_the_rest_imports(rest, tmp_path):
    assert int(succeeded(python(REST, "-c", LOAD, rest, at=tmp_path, path=beside(rest)))) > 300


def test_without_the_optional_parts_the_command_line_says_what_to_install(rest, tmp_path):
    told = "an optional part that is not installed here: in a checkout that has it run `make setup`"
    ours, path = (REST, "-m", "lightning_rl"), beside(rest)
    assert "convert" not in succeeded(python(*ours, "--help", at=tmp_path, path=path))
    said = python(*ours, "convert", "x.yaml", at=tmp_path, path=path).stderr
    assert f"no command 'convert'; it is in lightning_rl.convert, {told}" in said
    given = {k: v for k, v in CONFIG["data"]["init_args"].items() if k != "selection"}
    agent = {"class_path": "VerifiersAgent", "init_args": {"environment": "g", "python": "p"}}
    data = CONFIG["data"] | {"init_args": given | {"agent": agent}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG | {"data": data}))
    done = python(*ours, "fit", "--config", "run.yaml", at=tmp_path, path=path)
    assert done.returncode == 2
    missing = f"VerifiersAgent is not installed; it is in lightning_rl.verifiers, {told}"
    assert f"data.init_args.agent.class_path: {missing}" in done.stderr
    assert "run.yaml:" in done.stderr
