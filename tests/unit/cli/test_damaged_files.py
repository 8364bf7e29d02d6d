"""Test rollout files that are damaged or hostile, as `rollouts` and `view` meet them."""

import json
import os

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.process import printable
from lightning_rl.data.rollouts.files import as_record, open_rollouts
from lightning_rl.data.rollouts.validation import checked
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout
from tests.support.hostile.files import ESCAPES, WRONG, changed, good, lines


@pytest.mark.parametrize("path", WRONG)
def test_a_field_that_holds_something_else_is_named(path):
    value, says = WRONG[path]
    with pytest.raises(DataError) as caught:
        checked("a.jsonl:1", changed(path, value))
    assert str(caught.value).startswith("a.jsonl:1: not a rollout as ")
    assert says in str(caught.value)


def test_what_is_good_stays_as_it_is_and_what_is_missing_is_filled_in():
    whole = changed("rows.0.prompt_ids", [5, 6])
    assert checked("a", good()) == checked("a", whole) == whole
    del whole["rows"][0]["sampling"], whole["fork"], whole["iteration"]
    assert checked("a", whole) == changed("rows.0.prompt_ids", [5, 6]) | {"iteration": 0}
    told = {"prompt_ids": [1], "values": [0.5], "pieces": ["a", "b"]}
    [row] = checked("a", good() | {"rows": [told]})["rows"]
    assert (row["values"], row["token_ids"], row["role"]) == ([0.5], [], "")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pieces": [1]}, "rows[0].pieces[0] is 1, but must be a text"),
        ({"values": ["x"]}, "rows[0].values[0] is 'x'"),
    ],
)
def test_what_a_recorder_adds_is_looked_at_too(changes, says):
    with pytest.raises(DataError) as caught:
        checked("a", good() | {"rows": [{"prompt_ids": [1]} | changes]})
    assert says in str(caught.value)


def test_a_rollout_comes_back_whatever_it_holds(random_rollouts):
    for rollout in random_rollouts(0):
        record = json.loads(json.dumps(as_record(rollout)))
        assert Rollout.from_dict(checked("a", record)) == rollout


def test_a_terminal_obeys_nothing_that_a_model_wrote(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(changed("completion", ESCAPES), changed("group_id", ESCAPES)))
    assert main(["rollouts", str(file)]) == 0
    said = capsys.readouterr().out
    assert not {c for c in said if c != "\n" and not c.isprintable()}
    assert "␛]52;c;" in said
    assert printable("a\tb\nc ünd 😀") == "a\tb\nc ünd 😀"


def test_a_named_pipe_is_no_file(tmp_path):
    for name in ("a.jsonl", "a.sqlite", "a.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match="is a named pipe, not a file"):
            list(open_rollouts(tmp_path / name).read())
