"""Text in lists in dictionaries survives: files of every kind, prompts, and TensorDicts."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer

from lightning_rl import JSONLPrompts, ParquetPrompts, Prompt, Rollout
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.views import as_torchrl
from lightning_rl.extend import RolloutStatus, Row
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rewards.log import as_plain

SUFFIXES = ("jsonl", "parquet", "sqlite")
ODD = ["\ud83d", "\u2028", "\x85", "\x00", "\r\n", '"', "\\u00e4", "e\u0301", "👩‍👩‍👧", "ﷺ", ""]
"""Half of a pair, ends of lines, quotes, and what is longer than it looks."""

texts = st.text(max_size=8) | st.sampled_from(ODD)
nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
columns = st.dictionaries(texts, nested, max_size=4)
FIXED = {
    "tests": [["assert f('ä') == []", ""], [], [None, "🙂"]],
    "options": {"labels": ["a", ["b", {"c": []}]], "none": None, "": {}},
}


def rollout_of(columns, extra, said, place=0):
    return Rollout(
        Prompt("p", [{"role": "user", "content": said}], [3], columns),
        group_id="g",
        sample_index=place,
        seed=0,
        rows=[Row([3], [5], [True], [-0.5], [0])],
        completion=[{"role": "assistant", "content": said}],
        status=RolloutStatus.COMPLETED,
        reward=1.0,
        extra=extra,
    )


def through(rollouts, *paths):
    """What is left of rollouts that go from file to file."""
    for path in paths:
        file = open_rollouts(path)
        file.append(rollouts, 0)
        file.close()
        rollouts = [recorded.rollout for recorded in open_rollouts(path).read()]
    return rollouts


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=10, deadline=None)
@given(parts=st.lists(st.tuples(columns, columns, texts), min_size=1, max_size=3))
def test_any_nested_text_survives_a_file(suffix, parts):
    rollouts = [rollout_of(*part, place) for place, part in enumerate(parts)]
    with TemporaryDirectory() as folder:
        assert through(rollouts, Path(folder, f"a.{suffix}")) == rollouts


@settings(max_examples=8, deadline=None)
@given(columns=columns, extra=columns, said=texts, order=st.permutations(SUFFIXES))
def test_any_nested_text_survives_files_of_all_kinds(columns, extra, said, order):
    rollouts = [rollout_of(columns, extra, said)]
    with TemporaryDirectory() as folder:
        assert through(rollouts, *(Path(folder, f"a.{suffix}") for suffix in order)) == rollouts


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_numbers_of_numpy_and_torch_are_written_as_numbers(suffix, tmp_path):
    extra = {"scores": np.array([[0.5, 1.0]]), "best": np.int64(3), "tensor": torch.tensor([1, 2])}
    [found] = through([rollout_of(FIXED, extra, "x")], tmp_path / f"a.{suffix}")
    assert found.extra == {"scores": [[0.5, 1.0]], "best": 3, "tensor": [1, 2]}
    assert found.prompt.columns == FIXED


@given(value=nested)
def test_what_a_reward_logs_stays_nested(value):
    assert as_plain(value) == value
    assert as_plain({1: (np.float64(0.5), {"set"})}) == {"1": [0.5, "{'set'}"]}
    assert as_plain(torch.eye(2)) == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nested_text_of_a_prompt_file_reaches_the_prompt(kind, tmp_path, tiny_model):
    rows = [{"prompt": "3=", **FIXED, "answer": str(i)} for i in range(2)]
    path = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        plain = {"tests": FIXED["tests"], "options": {"labels": ["a"], "none": None}}
        rows = [row | plain for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = (JSONLPrompts if kind == "jsonl" else ParquetPrompts)(str(path))
    prompts.load(load_tokenizer(str(tiny_model)))
    for prompt, row in zip(prompts.first(2), rows, strict=True):
        assert prompt.columns == {key: row[key] for key in ("tests", "options", "answer")}


@settings(max_examples=8, deadline=None)
@given(parts=st.lists(st.tuples(columns, columns), min_size=1, max_size=4))
def test_any_nested_text_goes_through_a_tensordict(parts):
    rollouts = [rollout_of(*part, "x", place) for place, part in enumerate(parts)]
    view = as_torchrl(pack_rollouts(rollouts), rollouts)
    order = list(range(len(rollouts)))[::-1]
    for some, places in ((view, order[::-1]), (view[order], order), (view[1:], order[::-1][1:])):
        for row, place in zip(some, places, strict=True):
            assert row["columns"] == rollouts[place].prompt.columns
            assert row["extra"] == rollouts[place].extra


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
def test_nested_text_goes_through_torchrls_buffers(storage):
    rollouts = [rollout_of(FIXED | {"n": i}, {"notes": [["a"] * i]}, "x", i) for i in range(3)]
    buffer = ReplayBuffer(storage=storage(10), batch_size=2)
    buffer.extend(as_torchrl(pack_rollouts(rollouts), rollouts, length=4))
    for place, rollout in enumerate(rollouts):
        assert buffer[place]["columns"] == rollout.prompt.columns
        assert buffer[place]["extra"] == rollout.extra
