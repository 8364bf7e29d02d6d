"""Rollout files: exact in every format, whole after a kill at any point, searchable."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_rl.cli import main
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.rollouts.store import RolloutStore
from lightning_rl.data.rollouts.validation import checked
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rollout import RolloutStatus, Row

SUFFIXES = ("jsonl", "parquet", "sqlite")


@pytest.fixture(params=SUFFIXES)
def path(request, tmp_path) -> Path:
    return tmp_path / f"rollouts.{request.param}"


@pytest.fixture
def batch(make_rollout):
    """Make an iteration's rollouts: two groups of two, with all that a rollout can hold."""

    def make(iteration: int):
        common = {
            "seed": 2**62 + 1,  # beyond float's exact integers
            "logprobs": [-0.1, float("-inf"), -1 / 3],
            "versions": [iteration, -1, iteration + 1],
            "loss_mask": [True, False, True],
            "columns": {"answer": "ä", "numbers": [1, 2.5, None]},
        }
        rollouts = [
            make_rollout([4, 5], [6, 7, 1], group_id=f"{iteration}/{g}/p", sample_index=i, **common)
            for g in range(2)
            for i in range(2)
        ]
        rollouts[0].reward, rollouts[0].reward_parts = 0.1 + 0.2, {"exact": None, "style": 0.3}
        rollouts[1].completion = [{"role": "assistant", "content": "line\nbreak \u2028"}]
        rollouts[2].status, rollouts[2].reward = RolloutStatus.FAILED, None
        rollouts[2].error = "reward exact: KeyError: 'x'"
        rollouts[3].rows = [Row([4, 5])]
        return rollouts

    return make


def read(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [(r.iteration, r.rollout) for r in open_rollouts(path).read()]


# ---------------------------------------------------------------- every format


def test_rollouts_come_back_exactly_and_in_order(path, batch):
    file = open_rollouts(path)
    file.append(batch(0), 0)
    file.append(batch(1), 1)
    file.close()
    assert read(path) == [(i, rollout) for i in (0, 1) for rollout in batch(i)]
    groups = open_rollouts(path).groups()
    assert [[r.id for r in group] for group in groups] == [
        [f"{i}/{g}/p/{s}" for s in (0, 1)] for i in (0, 1) for g in (0, 1)
    ]


def test_a_file_says_how_far_it_came(path, batch):
    assert open_rollouts(path).recover() is None
    file = open_rollouts(path)
    file.append(batch(0), 0, {"iterations": 1, "state": {"cursor": [3]}})
    file.append(batch(1), 1, {"iterations": 2, "state": {"cursor": [7]}})
    file.close()
    before = read(path)
    assert open_rollouts(path).recover() == {"iterations": 2, "state": {"cursor": [7]}}
    assert read(path) == before


def test_rollouts_without_progress_cannot_be_gone_on_with(path, batch):
    file = open_rollouts(path)
    file.append(batch(0), 0)
    with pytest.raises(DataError, match="cannot be resumed; use another file"):
        file.recover()
    assert len(read(path)) == 4


def test_a_missing_file_is_named(path):
    with pytest.raises(DataError, match=rf"{path.name}.* does not exist"):
        list(open_rollouts(path).read())


def test_the_ending_must_be_known(tmp_path):
    with pytest.raises(ConfigError, match=r"one of \.jsonl, \.parquet, \.sqlite, \.db"):
        open_rollouts(tmp_path / "rollouts.csv")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        open_rollouts(tmp_path / "folder.jsonl")


def test_a_group_with_two_prompts_is_refused(tmp_path, make_rollout):
    file = open_rollouts(tmp_path / "a.jsonl")
    file.append([make_rollout([4], [6]), make_rollout([5], [6])], 0)
    with pytest.raises(DataError, match=r"a\.jsonl:2: group 'g' has a different prompt"):
        file.groups()


# ---------------------------------------------------------------- killed while writing

WRITER = """
import json, os, signal, sys
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.rollout import Rollout

path, count, kill_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
record = json.loads(sys.stdin.read())
file = open_rollouts(path)

class Deadly(list):
    "Kills the process as soon as it is read, in the midst of what reads it."
    def __iter__(self):
        os.kill(os.getpid(), signal.SIGKILL)

iteration = 0
while True:
    rollouts = [
        Rollout.from_dict(record | {"group_id": f"{iteration}/{g}/p", "sample_index": i})
        for g in range(count) for i in range(2)
    ]
    if iteration == kill_at:
        rollouts[count].rows[0].loss_mask = Deadly(rollouts[count].loss_mask)
    file.append(rollouts, iteration, {"iterations": iteration + 1})
    print(iteration, flush=True)
    iteration += 1
"""


def start_writer(path, record, count=2, kill_at=-1):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(count), str(kill_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    process.stdin.write(json.dumps(record))
    process.stdin.close()
    return process


@pytest.mark.parametrize("suffix", ["jsonl", "sqlite"])
def test_kill_9_loses_no_written_batch_and_leaves_no_half_one(tmp_path, batch, suffix):
    path = tmp_path / f"killed.{suffix}"
    tokens = [6] * 20_000  # so that writing is what it does most of the time
    record = batch(0)[0].to_dict()
    record["rows"][0] |= {
        "token_ids": tokens,
        "logprobs": [-0.1] * len(tokens),
        "versions": [0] * len(tokens),
        "loss_mask": [True] * len(tokens),
    }
    process = start_writer(path, record)
    for line in process.stdout:
        if line == "2\n":
            break
    if suffix == "sqlite":  # a reader needs not wait for the writer
        assert len(list(RolloutStore(path).read())) >= 12
    process.send_signal(signal.SIGKILL)
    written = 3 + len(process.stdout.readlines())
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()

    progress = open_rollouts(path).recover()
    # What it said it had written is there; one more may be, of which it had no time to say so.
    assert progress["iterations"] in (written, written + 1)
    ids = [rollout.id for _, rollout in read(path)]
    assert ids == [
        f"{i}/{g}/p/{s}" for i in range(progress["iterations"]) for g in (0, 1) for s in (0, 1)
    ]


def test_kill_9_within_a_transaction_undoes_it(tmp_path, batch):
    path = tmp_path / "killed.sqlite"
    process = start_writer(path, batch(0)[0].to_dict(), count=5, kill_at=1)
    assert process.stdout.readlines() == ["0\n"]
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert RolloutStore(path).recover() == {"iterations": 1}
    assert [iteration for iteration, _ in read(path)] == [0] * 10


def test_a_jsonl_file_cut_at_any_byte_is_repaired_and_continued(tmp_path, batch):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    ends = [0]
    for iteration in range(3):
        open_rollouts(whole).append(batch(iteration), iteration, {"iterations": iteration + 1})
        ends.append(whole.stat().st_size)
    content = whole.read_bytes()
    # Every byte around the ends of batches, and some of each line.
    near = {end + step for end in ends for step in range(-2, 4)}
    for size in sorted({n for n in near if 0 <= n <= len(content)} | set(range(0, ends[-1], 397))):
        cut.write_bytes(content[:size])
        file = open_rollouts(cut)
        progress = file.recover()
        done = sum(end <= size for end in ends) - 1
        assert (0 if progress is None else progress["iterations"]) == done
        assert cut.stat().st_size == ends[done]
        for iteration in range(done, 3):
            file.append(batch(iteration), iteration, {"iterations": iteration + 1})
        assert cut.read_bytes() == content


def test_half_a_last_line_is_left_out_with_a_warning(tmp_path, batch):
    path = tmp_path / "cut.jsonl"
    open_rollouts(path).append(batch(0), 0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"cut\.jsonl:4: the last line is cut off"):
        assert len(list(open_rollouts(path).read())) == 3


def test_an_unfinished_part_of_parquet_is_removed(tmp_path, batch):
    path = tmp_path / "a.parquet"
    open_rollouts(path).append(batch(0), 0, {"iterations": 1})
    (path / "part-00001.unfinished").write_bytes(b"PAR1 half")
    assert len(read(path)) == 4
    assert open_rollouts(path).recover() == {"iterations": 1}
    assert [p.name for p in path.iterdir()] == ["part-00000.parquet"]


def test_nothing_is_removed_from_a_file_that_is_not_ours(tmp_path, batch):
    path = tmp_path / "other.jsonl"
    lines = [json.dumps({"iteration": 0, "id": r.id} | r.to_dict()) for r in batch(0)]
    path.write_text("\n".join(lines))  # as PreviewTable writes them
    with pytest.raises(DataError, match=r"other\.jsonl:1 was not written by `lightning-rl"):
        open_rollouts(path).recover()
    assert path.read_text() == "\n".join(lines)
    assert len(read(path)) == 4  # but it can be read


def test_two_writers_are_told_apart(tmp_path, batch):
    first, second = (open_rollouts(tmp_path / "a.jsonl") for _ in range(2))
    first.append(batch(0), 0, {"iterations": 1})
    assert second.recover() == {"iterations": 1}
    second.append(batch(1), 1, {"iterations": 2})
    with pytest.raises(DataError, match="another process writes to it"):
        first.append(batch(1), 1, {"iterations": 2})
    assert len(read(tmp_path / "a.jsonl")) == 8


# ---------------------------------------------------------------- damage


def test_a_damaged_line_is_named(tmp_path, batch):
    path = tmp_path / "bad.jsonl"
    open_rollouts(path).append(batch(0), 0)
    lines = path.read_text().splitlines()
    for line, message in (
        (lines[1][:50], r"bad\.jsonl:2: damaged, not JSON from column"),
        ("[1]", r"bad\.jsonl:2: expected a rollout as a JSON object"),
        ('{"prompt": "1="}', r"bad\.jsonl:2: not a rollout as .* prompt is '1='"),
        (lines[1].replace("[6, 7, 1]", "[6, 7]"), r"bad\.jsonl:2: .* differ in length \(\[2, 3\]"),
    ):
        path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
        with pytest.raises(DataError, match=message):
            read(path)
    path.write_bytes(lines[0].encode() + b"\n\xff\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:2: damaged, not UTF-8"):
        read(path)


def test_a_damaged_parquet_file_is_named(tmp_path, batch):
    path = tmp_path / "bad.parquet"
    open_rollouts(path).append(batch(0), 0)
    part = path / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"part-00000\.parquet: not a Parquet file, or damaged"):
        read(path)


def test_a_single_parquet_file_is_read_but_not_added_to(tmp_path, batch):
    open_rollouts(tmp_path / "a.parquet").append(batch(0), 0)
    single = tmp_path / "single.parquet"
    (tmp_path / "a.parquet" / "part-00000.parquet").rename(single)
    assert len(read(single)) == 4
    with pytest.raises(DataError, match="a single Parquet file"):
        open_rollouts(single).recover()


def test_a_database_of_another_kind_is_refused_and_left_alone(tmp_path):
    text, other = tmp_path / "text.sqlite", tmp_path / "other.sqlite"
    text.write_text("no database, but a text of some length " * 10)
    with pytest.raises(DataError, match=r"text\.sqlite: not an SQLite file, or damaged"):
        read(text)
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    before = other.read_bytes()
    with pytest.raises(DataError, match=r"other\.sqlite is an SQLite file of another kind"):
        RolloutStore(other).recover()
    assert other.read_bytes() == before


# ---------------------------------------------------------------- the database


def test_columns_can_be_queried(tmp_path, batch):
    store = RolloutStore(tmp_path / "a.sqlite")
    store.append(batch(3), 3)
    rows = store.connection.execute(
        "SELECT id, iteration, version_min, version_max, reward, status, tokens FROM rollouts"
    ).fetchall()
    # Versions are 3, -1 (not the model's) and 4; the last rollout has no tokens at all.
    assert [tuple(row) for row in rows] == [
        ("3/0/p/0", 3, 3, 4, 0.1 + 0.2, "completed", 3),
        ("3/0/p/1", 3, 3, 4, 0.0, "completed", 3),
        ("3/1/p/0", 3, 3, 4, None, "failed", 3),
        ("3/1/p/1", 3, None, None, 0.0, "completed", 0),
    ]


def test_what_is_written_again_under_the_same_id_replaces_the_first(tmp_path, batch):
    store = RolloutStore(tmp_path / "a.sqlite")
    first, second = batch(0), batch(0)
    second[0].reward = 0.75
    store.append(first, 0)
    store.append(second[:2], 0)
    assert [r.rollout.reward for r in store.read()] == [None, 0.0, 0.75, 0.0]
    assert store.connection.execute("SELECT count(*) FROM rollouts").fetchone()[0] == 6


# ---------------------------------------------------------------- lightning-rl rollouts


def shown(capsys, *arguments) -> str:
    assert main(["rollouts", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_command_shows_sorts_and_counts_in_every_format(path, batch, capsys):
    file = open_rollouts(path)
    file.append(batch(0), 0)
    file.append(batch(1), 1)
    file.close()
    text = shown(capsys, path)
    assert "8 rollouts in 4 groups and 2 iterations" in text
    assert "status: completed 6, failed 2" in text
    # (0.3 + 0 + 0) / 3 in each iteration; 3 + 3 + 3 + 0 tokens.
    assert "reward: mean 0.1, from 0 to 0.3" in text
    assert "tokens: 18 in completions, mean 2.25" in text
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert rows == [f"{i}/{g}/p/{s}" for i in (0, 1) for g in (0, 1) for s in (0, 1)]

    text = shown(capsys, path, "--sort", "reward", "--limit", "3")
    rows = [line.split("│")[2].strip() for line in text.splitlines() if line.startswith("│")]
    assert rows == ["0.3", "0.3", "0"]
    text = shown(capsys, path, "--status", "failed", "--where", "iteration = 1")
    assert "1 rollouts in 1 groups" in text
    assert "reward exact: KeyError: 'x'" in text
    assert "line break" in shown(capsys, path, "--where", "id = '0/0/p/1'")
    assert shown(capsys, path, "--where", "tokens > 99") == "no rollouts\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "rewards > 1"], "no such column: rewards; write an SQL condition over"),
        (["--where", "1 = 1); DROP TABLE rollouts; --"], "--where"),
        (["--sort", "size"], "invalid choice: 'size'"),
        (["--limit", "-1"], "limit=-1 must be >= 0"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, batch, capsys, arguments, message):
    path = tmp_path / "a.sqlite"
    RolloutStore(path).append(batch(0), 0)
    assert main(["rollouts", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert len(read(path)) == 4


def test_the_command_names_the_damaged_line(tmp_path, batch, capsys):
    path = tmp_path / "bad.jsonl"
    open_rollouts(path).append(batch(0), 0)
    first, second, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, second[:40], *rest]) + "\n")
    assert main(["rollouts", str(path)]) == 2
    assert "data error: " in (said := capsys.readouterr().err)
    assert "bad.jsonl:2: damaged" in said


def test_two_files_are_compared_prompt_by_prompt(make_rollout, tmp_path, capsys):
    rewards = {"old": {"a": [0, 1], "b": [1, 1], "c": [0, None]}, "new": {"a": [1, 1], "b": [0, 1]}}
    rewards["new"] |= {"c": [0, 0.5], "d": [1, 1]}
    for name, own in rewards.items():
        rollouts = [
            make_rollout([4], [6], group_id=key, reward=reward)
            for key, values in own.items()
            for reward in values
        ]
        for rollout in rollouts:
            rollout.prompt.id = rollout.group_id
        open_rollouts(tmp_path / f"{name}.jsonl").append(rollouts, 0)
    new, old = (str(tmp_path / f"{name}.jsonl") for name in ("new", "old"))
    assert main(["rollouts", new, "--against", old]) == 0
    # Means .5, 1, 0 and 1, .5, .25: differences .5, -.5, .25, whose squares about 1/12 sum to .542.
    said = "0.5 → 0.5833, +0.0833 [-0.506, +0.672]; 2 of 3 prompts won, 1 lost, sign test p = 1"
    assert capsys.readouterr().out.splitlines() == [
        f"{new} against {old}: reward {said}",
        "1 prompts are in one file only, and left out",
    ]
    assert main(["rollouts", new, "--against", old, "--success_reward", "0.5"]) == 0
    assert "reward >= 0.5 0.5 → 0.6667, +0.167" in capsys.readouterr().out

    other = make_rollout([4], [6], reward=1.0)
    other.prompt.id, other.prompt.prompt = "a", "another"
    open_rollouts(tmp_path / "other.jsonl").append([other], 0)
    assert main(["rollouts", new, "--against", str(tmp_path / "other.jsonl")]) == 2
    assert "prompt 'a' is another in" in capsys.readouterr().err


def test_a_flat_record_is_refused_by_name():
    with pytest.raises(DataError, match="token_ids stands outside of rows"):
        checked("f.jsonl:1", {"prompt": "a", "token_ids": [1, 2]})
