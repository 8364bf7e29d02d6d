"""Test how ``view --follow`` reads one file that grows, is cut, or is replaced."""

import os
from pathlib import Path

from lightning_rl.cli.view.growing import GrowingFile
from lightning_rl.cli.view.runs import metrics_row
from tests.support.growing_run import add, line


def growing(path: Path) -> GrowingFile:
    return GrowingFile(path, metrics_row)


def iterations(file: GrowingFile) -> tuple[bool, list[float]]:
    rewritten, rows = file.read()
    return rewritten, [row["iteration"] for row in rows]


def test_each_line_is_read_once_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = growing(path)
    assert iterations(file) == (False, [])  # not there yet
    add(path, line(1) + line(2)[:9])
    assert iterations(file) == (False, [1])
    assert iterations(file) == (False, [])
    add(path, line(2)[9:-1])
    assert iterations(file) == (False, [])  # whole but for its end
    add(path, "\n" + line(3))
    assert iterations(file) == (False, [2, 3])
    assert (file.count, file.problem) == (3, "")


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = growing(path)
    add(path, line(1) + line(2, a=1.0) + line(3, a=1.0))
    file.read()
    os.truncate(path, len(line(1)))
    assert iterations(file) == (True, [1])
    add(path, line(2, a=1.0))
    file.read()
    # Cut, and beyond where reading ended before anybody looks again.
    os.truncate(path, len(line(1)))
    add(path, line(2, a=2.0) + line(3, a=2.0))
    assert iterations(file) == (True, [1, 2, 3])
    os.truncate(path, 0)
    assert iterations(file) == (True, [])


def test_another_file_in_its_place_is_read_from_its_start(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    file = growing(path)
    add(path, line(1) + line(2))
    file.read()
    add(other, line(7) + line(8) + line(9))
    other.replace(path)
    assert iterations(file) == (True, [7, 8, 9])
    # A file that is written as a whole each time goes on, if it begins with what was read.
    add(other, line(7) + line(8) + line(9) + line(10))
    other.replace(path)
    assert iterations(file) == (False, [10])


def test_damaged_lines_are_one_message_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = growing(path)
    add(path, line(1) + "garbage\n" + line(2) + '{"a": 1}\n' + "\n")
    assert iterations(file) == (False, [1, 2])
    assert file.problem.startswith(f"{path}:2: damaged, not JSON")
    assert file.problem.endswith(" (and 2 more)")
    os.truncate(path, len(line(1)))
    assert iterations(file) == (True, [1])
    assert file.problem == ""
