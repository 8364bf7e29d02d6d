"""Text in lists in dictionaries survives: files of every kind, prompts, and TensorDicts."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer

from lightning_rl import IterablePrompts, JSONLPrompts, ParquetPrompts, Prompt, Rollout
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.sources import prompts_of
from lightning_rl.data.views import as_torchrl
from lightning_rl.errors import DataError
from lightning_rl.extend import RolloutStatus, Row
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rewards.log import as_plain
from tests.support.tiny_models import chat_tokenizer

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
    """Return what is left of rollouts that go from file to file."""
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


# ---------------------------------------------------------------- chats, from every kind of table

PLACES = ("JSONL", "Parquet", "list", "dataset", "pandas")
ITEMS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}{% endfor %}\n"
    "{% endfor %}"
)
"""The template goes through the arguments one by one, as Qwen3-Coder's does."""


def from_all_places(rows, tokenizer):
    """Return the prompts of these rows, by where they were kept."""
    table = pyarrow.Table.from_pylist(rows)
    with TemporaryDirectory() as folder:
        lines, parquet = Path(folder, "a.jsonl"), Path(folder, "a.parquet")
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        pyarrow.parquet.write_table(table, parquet)
        frame = pandas.read_parquet(parquet)
        found = {}
        sources = (lines, parquet, rows, datasets.Dataset(table), frame)
        for place, source in zip(PLACES, sources, strict=True):
            prompts = prompts_of(source)
            prompts.load(tokenizer)
            found[place] = prompts.first()
    return found


def called(arguments, **others):
    function = {"name": "find", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": function}],
    } | others


QUERY, WHERE = {"q": "ä"}, {"where": {"city": "Köln", "zip": "5"}, "tags": ["a", ""]}
RESULT = {"role": "tool", "content": "1"}
WHOLE = [
    {"role": "user", "content": "Hi", "name": "x"},
    called(QUERY | WHERE, content="I look."),
    RESULT,
]
"""Has every key, so a table of Arrow gives them to all messages."""
OPTIONAL = {
    "q": texts.filter(lambda text: "\ud83d" not in text),
    "where": st.sampled_from([{}, {"zip": "1"}, {"city": "Ulm", "zip": "1"}]),
    "tags": st.lists(st.sampled_from(["a", "b"]), max_size=2),
}
arguments = st.fixed_dictionaries({}, optional=OPTIONAL).map(
    lambda some: {key: some[key] for key in OPTIONAL if key in some}  # Arrow has one order of keys
)
calls = arguments.map(called) | st.tuples(arguments, st.none() | st.just("So.")).map(
    lambda pair: called(pair[0], content=pair[1])
)
saids = st.sampled_from(
    [
        {"role": "assistant", "content": "3", "tool_calls": []},
        {"role": "assistant", "content": "3", "tool_calls": None},
        {"role": "tool", "content": "4", "name": None},
    ]
)


def in_text(message):
    if not message.get("tool_calls"):
        return message
    [call] = message["tool_calls"]
    text = json.dumps(call["function"]["arguments"] or "")
    function = call["function"] | {"arguments": "" if text == '""' else text}
    return message | {"tool_calls": [call | {"function": function}]}


def answered(chat):
    """End a prompt by an answer: a prompt cannot end in calls."""
    asks = chat and chat[-1].get("tool_calls")
    return [*chat, RESULT] if asks else chat


@pytest.mark.parametrize("template", ["llama3_1", "qwen2_5", "qwen3", ITEMS])
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(chats=st.lists(st.lists(calls | saids, max_size=3), min_size=1, max_size=3))
def test_a_chat_has_the_same_tokens_wherever_it_was_kept(template, chats):
    known = template != ITEMS
    tokenizer = chat_tokenizer(template) if known else chat_tokenizer("qwen3", template=template)
    rows = [{"prompt": WHOLE + answered(chat)} for chat in ([], *chats)]
    texts = [{"prompt": [*map(in_text, row["prompt"])]} for row in rows]
    found = from_all_places(rows, tokenizer)
    expected = found["list"]
    for prompts in (*found.values(), *from_all_places(texts, tokenizer).values()):
        assert [p.token_ids for p in prompts] == [p.token_ids for p in expected]
        assert [p.prompt for p in prompts] == [p.prompt for p in expected]


@pytest.mark.parametrize("as_text", [False, True])
def test_calls_read_as_the_template_writes_them(as_text):
    chat = [{"role": "user", "content": "Hi"}, called(QUERY, content=None), called({}), *WHOLE]
    if as_text:
        chat = [*map(in_text, chat)]
    tokenizer = chat_tokenizer("qwen2_5")
    told = (
        '{"q": "ä"}',
        "{}",
        '{"q": "ä", "where": {"city": "Köln", "zip": "5"}, "tags": ["a", ""]}',
    )
    for [prompt] in from_all_places([{"prompt": chat}], tokenizer).values():
        text = tokenizer.decode(prompt.token_ids)
        calls = re.findall(
            r'<tool_call>\n\{"name": "find", "arguments": (.*)\}\n</tool_call>', text
        )
        assert calls == [*told]


def test_deepseeks_template_is_given_arguments_as_text_and_no_content():
    tokenizer = chat_tokenizer("deepseek_r1_distill")
    prompts = IterablePrompts(
        [{"prompt": [{"role": "user", "content": "Hi"}, called(QUERY), RESULT]}]
    )
    prompts.load(tokenizer)
    text = tokenizer.decode(prompts[0].token_ids)
    assert '<｜tool▁sep｜>find\n```json\n{"q": "ä"}\n```<｜tool▁call▁end｜>' in text


def test_arguments_that_are_no_json_stay_as_they_are():
    chat = [{"role": "user", "content": "Hi"}, called('{"q": '), RESULT]
    prompts = IterablePrompts([{"prompt": chat}])
    prompts.load(chat_tokenizer("qwen3"))
    assert '"arguments": {"q": }\n' in chat_tokenizer("qwen3").decode(prompts[0].token_ids)


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_only_a_turn_that_calls_may_be_without_content(content):
    prompts = IterablePrompts([{"prompt": [{"role": "assistant", **content}]}])
    with pytest.raises(DataError, match="row 0: 'prompt' must be a non-empty string or a list of"):
        prompts.load(chat_tokenizer("qwen3"))


def test_a_chat_that_a_template_cannot_render_is_named():
    two = called(QUERY)
    two["tool_calls"] *= 2
    prompts = IterablePrompts([{"prompt": [{"role": "user", "content": "1"}, two, RESULT]}])
    prompts.load(chat_tokenizer("llama3_1"))
    with pytest.raises(DataError, match=r"row 0: the chat template cannot render .* single tool"):
        prompts[0]
