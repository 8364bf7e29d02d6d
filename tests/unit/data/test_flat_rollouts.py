"""Files and checkpoints of the earlier, flat form of rollouts are read as what they were.

``flat_rollouts`` was written by the code before a rollout was a list of rows.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_rl.cli.view.flags import find_flags
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import read_run
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.loader import RolloutLoader
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.files import as_rollout, open_rollouts
from lightning_rl.data.rollouts.rows import rows_of
from lightning_rl.errors import DataError
from lightning_rl.rollout import (
    Call,
    Fork,
    Prompt,
    Rollout,
    RolloutStatus,
    Row,
    SamplingDistribution,
)
from tests.support.planted_run import blocks_of

FILES = Path(__file__).parent / "flat_rollouts"


def expected() -> list[Rollout]:
    """What was written: a rollout of one row, and one of three that branched off from it."""
    prompt = Prompt("7", [{"role": "user", "content": "ab"}], [4, 5], {"answer": "ba"}, "letters")
    one = Rollout(
        prompt,
        "3/0/letters/7",
        0,
        11,
        SamplingDistribution(0.7, 5, 0.9, 0.1, 1.1, min_tokens=2),
        [Row([4, 5], [6, 7, 1], [True, False, True], [-0.5, 0.0, -0.25], [4, -1, 5])],
        completion=[{"role": "assistant", "content": "ba"}],
        status=RolloutStatus.COMPLETED,
        finish_reason="stop",
        reward=1.0,
        reward_parts={"exact": 1.0},
    )
    hotter, longer = SamplingDistribution(1.0, 5, 0.9), SamplingDistribution(0.7, 5, 0.9)
    longer.min_tokens = 2
    first = [6, 3, 9], [True, False, True], [-0.5, 0.0, -1.0], [4, -1, 4]
    second = [8, 1], [True, True], [-0.125, -0.5], [4, 5]
    other = Rollout(
        prompt,
        "3/0/letters/7",
        0,
        11,
        SamplingDistribution(0.7, 5, 0.9),
        [
            Row([4, 5], *first, "solver", hotter),
            Row([4, 5, 2], *second, "critic", longer),
            Row([6], [9], [True], [-2.0], [5], "critic"),
        ],
        [
            Call(0, 0, 1, 11),
            Call(1, 0, 2, 12, reward=0.5, state="s"),
            Call(0, 2, 3, 13),
            Call(2, 0, 1, 14),
        ],
        Fork(1, 0, 99),
        completion="c",
        status=RolloutStatus.COMPLETED,
        finish_reason="length",
        reward=0.5,
        role_rewards={"critic": 0.25},
        dropped=2,
    )
    return [one, other]


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (FILES / name).read_text().splitlines()]


COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """The same rollouts as the earlier code wrote them to Parquet.

    The lists of all rows stand one after the other in columns; further rows tell their lengths.
    """
    table = []
    for record in lines("rollouts.jsonl"):
        columns = {name: record.pop(name) for name in COLUMNS}
        for row in record["further"]:
            row["tokens"] = len(row["token_ids"])
            columns = {name: [*column, *row.pop(name)] for name, column in columns.items()}
        table.append({**columns, "iteration": record.pop("iteration"), "rest": json.dumps(record)})
    path = tmp_path_factory.mktemp("flat") / "rollouts.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    return path


@pytest.mark.parametrize("name", ["rollouts.jsonl", "recorded.jsonl", "parquet"])
def test_a_file_is_read(name, parquet):
    found = list(open_rollouts(parquet if name == "parquet" else FILES / name).read())
    assert [recorded.rollout for recorded in found] == expected()
    assert [recorded.iteration for recorded in found] == [3, 3]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "sqlite"])
def test_what_was_read_is_written_in_todays_form(suffix, tmp_path):
    file = open_rollouts(tmp_path / f"again.{suffix}")
    file.append(
        [recorded.rollout for recorded in open_rollouts(FILES / "rollouts.jsonl").read()], 3
    )
    file.close()
    assert [recorded.rollout for recorded in open_rollouts(file.path).read()] == expected()


def test_a_checkpoint_of_rollouts_in_flight_is_gone_on_with():
    records = lines("rollouts.jsonl")
    collector = SyncCollector()
    collector.load_state_dict({"groups": [records]})
    assert collector.state_dict() == {"groups": [[r.to_dict() for r in expected()]]}

    class Source:
        def load_shares(self, states: list[dict]) -> None:
            assert states == [{}]

    loader = RolloutLoader(lambda i: pytest.fail("collected again"), Source(), 2, lambda: 0)
    share = {"source": {}, "first": 0, "collected": 1, "place": 0, "pending": records}
    loader.load_state_dict({"ranks": [share]})
    batch = next(iter(loader))
    assert loader.current == expected()
    assert batch["rollouts", "temperature"].tolist() == pytest.approx([0.7, 1.0, 0.7, 0.7])
    assert batch["tokens", "loss_mask"].equal(pack_rollouts(expected())["tokens", "loss_mask"])


def test_the_viewer_shows_it():
    run = read_run(FILES / "recorded.jsonl", 10)
    assert [find_flags(record) for record in run.rollouts] == [{}, {}]
    one, other = (rows_of(record) for record in run.rollouts)
    assert (one[0]["pieces"], one[0]["advantages"]) == (["a", "b", "<eos>"], [0.5, 0.0, 0.5])
    assert [(row["role"], row["pieces"]) for row in other] == [
        ("solver", ["a", "?", "c"]),
        ("critic", ["8", "1"]),
        ("critic", ["9"]),
    ]
    assert other[0]["loss_mask"] == [False, False, True]  # before the fork it is another's
    shown = json.loads(blocks_of(build_page([run]))["index"])["rollouts"]
    assert [row["temperature"] for row in shown] == [0.7, 0.7]
    assert [row["role"] for row in shown[1]["rows"]] == ["solver", "critic", "critic"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": "abc"}, "rows[0].token_ids is 'abc', and must be a list"),
        ({"further": 3}, "rows is 3, and must be a list"),
        ({"further": [3]}, "rows[1] is 3, and must be an object"),
        ({"further": [{}]}, "rows[1].prompt_ids is missing"),
        ({"sampling": [1]}, "rows[0].sampling is [1], and must be an object or null"),
        ({"temperature": "hot"}, "sampling.temperature is 'hot', and must be a number"),
        ({"prompt": 3}, "prompt is 3, and must be an object"),
        ({"versions": [1]}, "differ in length ([1, 3])"),
    ],
)
def test_what_is_damaged_in_it_is_named(changes, says):
    with pytest.raises(DataError) as caught:
        as_rollout("a.jsonl:1", lines("rollouts.jsonl")[0] | changes)
    assert says in str(caught.value)
