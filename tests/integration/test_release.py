"""Test make release: version, changelog entry, tag, sdist and wheel, or nothing if one fails."""

import os
import shutil
import subprocess
import zipfile
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "packaging"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TOOLS / "made").exists(), reason="install/environment.sh packaging makes it"
    ),
]
PERSON = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def run(tmp_path):
    """Run a command in a repository of its own that holds this checkout's files."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in listed.splitlines():
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "packaging").symlink_to(TOOLS)

    def command(*words):
        env = os.environ | PERSON
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)

    command("git", "init", "--quiet")
    (tmp_path / ".git/info/exclude").write_text(".venv\n")
    command("git", "add", "--all")
    command("git", "commit", "--quiet", "--message", "All of it")
    assert command("git", "status", "--porcelain").stdout == ""
    return command


def test_a_release_is_a_tag_an_entry_and_artefacts(run, tmp_path):
    entry = (tmp_path / "CHANGELOG.md").read_text().partition("## Unreleased\n")[2]
    done = run("install/release.sh", "7.8.9rc1")
    assert done.returncode == 0, done.stderr
    assert "v7.8.9rc1 is tagged, and nothing was uploaded" in done.stdout
    assert run("git", "tag", "--points-at", "HEAD").stdout == "v7.8.9rc1\n"
    assert run("git", "status", "--porcelain").stdout == ""
    changed = run("git", "diff", "--name-only", "HEAD~").stdout.split()
    assert changed == ["CHANGELOG.md", "setup.cfg"]
    dated = f"## Unreleased\n\n## 7.8.9rc1 ({date.today()})\n{entry}"
    assert (tmp_path / "CHANGELOG.md").read_text().endswith(dated)
    wheel, sdist = (tmp_path / "dist").iterdir()
    if wheel.suffix != ".whl":
        wheel, sdist = sdist, wheel
    assert sdist.name == "lightning_rl-7.8.9rc1.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("lightning_rl-7.8.9rc1.dist-info/METADATA").decode()
    assert "\nVersion: 7.8.9rc1\n" in metadata
    # The same again has a tag; another has no entry.
    assert "v7.8.9rc1 is tagged already" in run("install/release.sh", "7.8.9rc1").stderr
    assert "has nothing under '## Unreleased'" in run("install/release.sh", "7.9.0").stderr


def test_what_cannot_be_released_leaves_everything_as_it_was(run, tmp_path):
    head = run("git", "rev-parse", "HEAD").stdout
    assert "VERSION='next' is no version" in run("install/release.sh", "next").stderr
    (tmp_path / "README.md").write_text("changed")
    assert "there are changes" in run("install/release.sh", "7.8.9").stderr
    # This does not build: the list of packages names one that is not there.
    (tmp_path / "setup.cfg").write_text(
        (tmp_path / "setup.cfg").read_text().replace("lightning_rl.agents\n", "lightning_rl.gone\n")
    )
    run("git", "commit", "--all", "--quiet", "--message", "Wrong")
    assert run("install/release.sh", "7.8.9").returncode != 0
    assert run("git", "tag").stdout == ""
    assert run("git", "status", "--porcelain").stdout == ""
    assert run("git", "rev-parse", "HEAD~").stdout == head
