"""Provide hostile calls: damaged files that ``view`` and ``rollouts`` are given."""

import json
import os
import socket
import sqlite3
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning_rl.data.rollouts.files import as_record, open_rollouts
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, Row
from tests.support.hostile.call import Call, command

ESCAPES = "\x1b]52;c;aGFja2Vk\x07\x1b[2Jblank\x9b31m\u202e"
"""Writes a terminal's clipboard, clears its screen, and turns text round."""
DEEP = 100_000


def good() -> dict[str, Any]:
    """Return a rollout as a record."""
    prompt = Prompt("p", "Say hello.", [5, 6])
    rollout = Rollout(
        prompt,
        "1/0/p",
        0,
        seed=1,
        rows=[Row([5, 6], [7, 8], [True, True], [-0.5, -0.25], [0, 0])],
        completion="hello",
        status=RolloutStatus.COMPLETED,
        finish_reason="stop",
        reward=1.0,
    )
    return json.loads(json.dumps({"iteration": 1} | as_record(rollout)))


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the same with another value at ``a.b.c``; ``...`` leaves the field out."""
    record = deepcopy(good())
    *folders, name = path.split(".")
    place: Any = record
    for folder in folders:
        place = place[int(folder) if isinstance(place, list) else folder]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return record


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


WRONG: dict[str, tuple[Any, str]] = {
    "prompt": (None, "prompt is None, but must be an object"),
    "prompt.token_ids": ("abc", "prompt.token_ids is 'abc', but must be a list"),
    "prompt.prompt": (3, "prompt.prompt is 3, but must be a text or a list"),
    "prompt.id": (..., "prompt.id is missing"),
    "rows": ([3], "rows[0] is 3, but must be an object"),
    "rows.0.prompt_ids": (..., "rows[0].prompt_ids is missing"),
    "rows.0.token_ids": ([1e30, 2], "rows[0].token_ids[0] is 1e+30, but must be an integer"),
    "rows.0.logprobs": (["low", 0.0], "rows[0].logprobs[0] is 'low', but must be a number"),
    "rows.0.versions": ([2**40, 0], "rows[0].versions holds 1099511627776, but must fit into"),
    "rows.0.loss_mask": ({}, "rows[0].loss_mask is {}, but must be a list"),
    "rows.0.sampling": ("hot", "rows[0].sampling is 'hot', but must be an object or null"),
    "sampling": (0.5, "sampling is 0.5, but must be an object"),
    "sampling.top_p": ("most", "sampling.top_p is 'most', but must be a number"),
    "reward": ("high", "reward is 'high', but must be a number or null"),
    "reward_parts": ([1], "reward_parts is [1], but must be an object"),
    "status": ("done", "status is 'done', but must be one of init"),
    "iteration": ("first", "iteration is 'first', but must be an integer"),
    "calls": ([{"row": "x"}], "calls[0].row is 'x', but must be an integer"),
    "fork": (7, "fork is 7, but must be an object or null"),
    "completion": ([1, 2], "completion[0] is 1, but must be an object"),
    "group_id": (None, "group_id is None, but must be a text"),
    "id": ([], "id is [], but must be a text"),
    "seed": (10**30, "seed is 1000000000000000000000000000000, but must fit into 64 bits"),
}
"""The values that a field must not hold, and what is said of each."""


def given(content: bytes, *arguments: str, name: str = "some.jsonl") -> Callable[[Path], object]:
    """Write a file, then run a command on it."""

    def play(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        command(*arguments)(folder)

    return play


def made(make: Callable[[Path], object], *arguments: str) -> Callable[[Path], object]:
    """Make something, then run a command on it."""

    def play(folder: Path) -> None:
        make(folder)
        command(*arguments)(folder)

    return play


def _pipe(name: str) -> Callable[[Path], object]:
    return lambda folder: os.mkfifo(folder / name)


def _socket(folder: Path) -> None:
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("some.jsonl")


def _loop(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"iteration": 0}\n')
    (folder / "summary.json").symlink_to("summary.json")


def _sqlite(query: str, *values: Any) -> Callable[[Path], object]:
    """Make a good database, and then do to it what a query does."""

    def make(folder: Path) -> None:
        file = open_rollouts(folder / "some.sqlite")
        file.append([Rollout.from_dict(good())], 1)
        file.close()
        with sqlite3.connect(folder / "some.sqlite") as database:
            database.execute(query, values)
        database.close()

    return make


def _parquet(**columns: list[Any]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "some.parquet")

    return make


def _both(name: str, content: bytes, says: str) -> list[Call]:
    return [
        Call(f"rollouts of {name}", given(content, "rollouts", "some.jsonl"), (says,)),
        Call(f"view of {name}", given(content, "view", "some.jsonl"), (says,)),
    ]


def _run(name: str, file: str, content: bytes, says: str, right: bool = False) -> Call:
    begin = lines({"iteration": 0}, {"iteration": 1, "reward/mean": 0.5})

    def make(folder: Path) -> None:
        (folder / "metrics.jsonl").write_bytes(begin)
        (folder / "rollouts.jsonl").write_bytes(lines(good()))
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)

    return Call(f"view of a run with {name}", made(make, "view", "{folder}"), (says,), right)


CALLS: list[Call] = [
    *_both("a line that is cut off in the middle of a file", b'{"a": \n' + lines(good()), ":1: "),
    *_both("bytes that are no text", lines(good()) + b'{"\xff\xfe": 1}\n', "damaged, not UTF-8"),
    *_both(
        "lists within lists", b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}\n", "nested too deeply"
    ),
    *_both("a number of 5000 digits", b'{"a": ' + b"9" * 5000 + b"}\n", "4300 digits"),
    *_both("a list in place of an object", b"[1, 2]\n", "some.jsonl:1: "),
    Call("view of a named pipe", made(_pipe("some.jsonl"), "view", "some.jsonl"), ("some.jsonl",)),
    Call(
        "a run whose metrics are a named pipe",
        made(_pipe("metrics.jsonl"), "view", "{folder}"),
        ("is a named pipe",),
    ),
    Call("rollouts of a socket", made(_socket, "rollouts", "some.jsonl"), ("is a socket",)),
    Call("rollouts of a device", command("rollouts", "/dev/zero"), ("its ending must be one of",)),
    Call(
        "rollouts of a folder",
        made(lambda f: (f / "a.jsonl").mkdir(), "rollouts", "a.jsonl"),
        ("is a directory",),
    ),
    Call("a run with a link to itself", made(_loop, "view", "{folder}"), ("summary.json",)),
    Call(
        "rollouts of a status that a terminal obeys",
        given(lines(changed("status", "\x1b[2J")), "rollouts", "some.jsonl"),
        ("must be one of init",),
    ),
    Call(
        "rollouts of half a surrogate pair",
        given(lines(changed("completion", "\ud83d")), "rollouts", "some.jsonl"),
        ("1 rollouts in 1 groups",),
        right=True,
    ),
    Call("view of an empty file", given(b"", "view", "some.jsonl"), ("rollouts: 0",), right=True),
    Call(
        "view of a last line that is cut off",
        given(lines(good()) + b'{"iter', "view", "some.jsonl"),
        ("rollouts: 1",),
        right=True,
    ),
    Call(
        "view of infinite rewards",
        given(lines(changed("reward", float("inf"))), "view", "some.jsonl"),
        ("rollouts: 1",),
        right=True,
    ),
    _run("a summary that is no object", "summary.json", b"[1", "runs: 1", right=True),
    _run("a model that is a number", "summary.json", b'{"model": 3}', "runs: 1", right=True),
    _run(
        "metrics without an iteration",
        "metrics.jsonl",
        lines({"a": 1}),
        "iteration is None, but must be a number",
    ),
    _run(
        "metrics of the iteration NaN",
        "metrics.jsonl",
        lines({"iteration": float("nan")}),
        "iteration is nan",
    ),
    _run(
        "metrics that are broken",
        "metrics.jsonl",
        b'{"iteration" 1}\n',
        "metrics.jsonl:1: damaged, not JSON",
    ),
    _run(
        "a tokenizer that is none",
        "hf/tokenizer.json",
        b"{}",
        "hf/tokenizer.json: it is not a tokenizer",
    ),
    Call(
        "view into a folder that is a file",
        given(lines(good()), "view", "some.jsonl", "--out", "some.jsonl/a.html"),
        ("some.jsonl",),
    ),
    Call(
        "view onto a full disk",
        given(lines(good()), "view", "some.jsonl", "--out", "/dev/full/a.html"),
        ("/dev/full",),
    ),
    Call(
        "view into a folder where nobody may write",
        given(lines(good()), "view", "some.jsonl", "--out", "/proc/a.html"),
        ("/proc/a.html",),
    ),
    Call(
        "no database",
        given(b"SQLite format 3\0" + b"x" * 4096, "rollouts", "a.sqlite", name="a.sqlite"),
        ("a.sqlite: not an SQLite file",),
    ),
    Call(
        "a database without its table",
        made(_sqlite("DROP TABLE rollouts"), "rollouts", "some.sqlite"),
        ("no such table",),
    ),
    Call(
        "a database with a text for a number",
        made(_sqlite("UPDATE rollouts SET tokens = 'x'"), "rollouts", "some.sqlite"),
        ("tokens is 'x'",),
    ),
    Call(
        "a database with a broken rest",
        made(_sqlite("UPDATE rollouts SET rest = '{'"), "rollouts", "some.sqlite"),
        ("damaged, not JSON",),
    ),
    Call(
        "a database with broken arrays",
        made(_sqlite("UPDATE rollouts SET logprobs = x'00'"), "view", "some.sqlite"),
        ("damaged logprobs",),
    ),
    Call(
        "Parquet that is none",
        given(b"PAR1", "rollouts", "a.parquet", name="a.parquet"),
        ("not a Parquet file, or damaged",),
    ),
    Call(
        "Parquet without columns",
        made(_parquet(a=[1]), "rollouts", "some.parquet"),
        ("damaged row (KeyError('rest'))",),
    ),
    Call(
        "Parquet with other types",
        made(_parquet(rest=["3"], token_ids=[1]), "rollouts", "some.parquet"),
        ("damaged row",),
    ),
]
