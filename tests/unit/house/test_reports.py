"""Test the seconds of each test file, and the slow tests that a change touches."""

import pytest

from benchmarks.house.modules import modules_of
from tests.support.reports import durations_text, read_durations, unexplained
from tests.touched import imported_by, touched


def test_a_long_file_is_asked_for_its_reason(tmp_path):
    for name, text in (("why", '"""Layouts.\n\nSlow: 20 engines.\n"""'), ("silent", "")):
        (tmp_path / f"{name}.py").write_text(text)
    seconds = {"why.py": 70.0, "silent.py": 70.0, "gone.py": 70.0}
    assert unexplained(seconds, tmp_path) == [
        "silent.py took 70 s; let a line 'Slow: ...' of its docstring say why"
    ]
    assert unexplained({"silent.py": 50.0}, tmp_path) == []


def test_durations_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "durations.txt"
    assert read_durations(path) == {}
    path.write_text(durations_text("abc123", {"tests/b.py": 1.25, "tests/a.py": 61.0}))
    assert path.read_text().splitlines()[2:] == ["    61.0  tests/a.py", "     1.2  tests/b.py"]
    assert read_durations(path) == {"tests/a.py": 61.0, "tests/b.py": 1.2}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Make a checkout: two slow files of tests and a fast one, with different ways to import."""
    files = {
        "lightning_rl/a.py": "",
        "lightning_rl/b.py": "import lightning_rl.a\n",
        "tests/support/help.py": "import lightning_rl.a\n",
        "tests/test_one.py": "import lightning_rl.a, lightning_rl.b  # slow\n",
        "tests/test_two.py": "def test():\n    import tests.support.help  # slow\n",
        "tests/test_three.py": "import lightning_rl.a\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("tests.touched.ROOT", tmp_path)
    return modules_of(tmp_path, "lightning_rl", "tests")


def test_imports_count_through_support_but_not_through_the_library(modules):
    found = imported_by(modules)
    assert found == {
        "tests.test_one": {"tests.test_one", "lightning_rl.a", "lightning_rl.b"},
        "tests.test_two": {"tests.test_two", "tests.support.help", "lightning_rl.a"},
    }


def test_those_that_a_change_touches_most_run_first_within_the_budget(modules):
    one, two = "tests/test_one.py", "tests/test_two.py"
    a, b, helper = (modules[n] for n in ("lightning_rl.a", "lightning_rl.b", "tests.support.help"))
    seconds = {one: 30.0, two: 40.0}
    assert touched([a, b], modules, seconds, 100.0) == ([one, two], [])
    assert touched([a, b], modules, seconds, 60.0) == ([one], [two])
    assert touched([a, helper], modules, seconds, 60.0) == ([two], [one])
    assert touched([b], modules, seconds, 100.0) == ([one], [])
    assert touched([modules["tests.test_three"]], modules, seconds, 100.0) == ([], [])
