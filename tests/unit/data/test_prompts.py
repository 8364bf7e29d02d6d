"""Prompts from every source; what is wrong in them is named; their order survives a checkpoint."""

import json
import warnings
from types import SimpleNamespace

import pytest
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing

from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.encoding import PromptEncoder
from lightning_rl.data.sources import (
    HFDatasetPrompts,
    IterablePrompts,
    JSONLPrompts,
    ParquetPrompts,
    prompts_of,
)
from lightning_rl.data.tables import JSONLTable
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.models.policy import load_tokenizer
from lightning_rl.models.tokenizer import with_chat_variables
from lightning_rl.module import PolicyModule
from lightning_rl.run.files.resume import enter_run
from tests.support.tiny_models import chat_tokenizer

ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in (12, 3, 456, 7, 89)]
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


def jsonl(path, *lines: str) -> JSONLPrompts:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return JSONLPrompts(str(path), shuffle=False)


# ---------------------------------------------------------------- sources


def from_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS))  # blank lines between
    return JSONLPrompts(str(path), shuffle=False)


def from_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    return ParquetPrompts(str(tmp_path / "a.parquet"), shuffle=False)


def from_datasets(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    return HFDatasetPrompts(str(tmp_path / "set"), shuffle=False)


def from_a_split(tmp_path):
    import datasets

    splits = {
        "train": datasets.Dataset.from_list(ROWS[:1]),
        "test": datasets.Dataset.from_list(ROWS),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    return HFDatasetPrompts(str(tmp_path / "splits"), split="test", shuffle=False)


def from_an_iterable(tmp_path):
    return IterablePrompts(iter(ROWS), shuffle=False)


def from_a_callable(tmp_path):
    return IterablePrompts(lambda count: ROWS[:count], arguments={"count": 5}, shuffle=False)


def from_pandas(tmp_path):
    import pandas

    return taken(pandas.DataFrame(ROWS))


def from_arrow(tmp_path):
    import pyarrow

    return taken(pyarrow.Table.from_pylist(ROWS))


def taken(rows):
    """Pass rows as a constructor takes them in place of prompts."""
    prompts = prompts_of(rows)
    prompts.shuffle = False
    return prompts


SOURCES = [
    from_jsonl, from_parquet, from_datasets, from_a_split, from_an_iterable, from_a_callable,
    from_pandas, from_arrow,
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_prompts(tmp_path, tokenizer, source):
    prompts = source(tmp_path)
    prompts.load(tokenizer)
    assert len(prompts) == 5
    drawn = prompts.draw(5)
    assert [p.prompt for p in drawn] == ["12=", "3=", "456=", "7=", "89="]
    # "=" is token 2 and the digit d is d + 3.
    assert [p.token_ids for p in drawn[:2]] == [[4, 5, 2], [6, 2]]
    assert drawn[2].columns == {"answer": "456"}
    assert [p.id for p in drawn] == ["0", "1", "2", "3", "4"]


def test_an_id_column_names_the_prompts(tokenizer):
    prompts = IterablePrompts([{"prompt": "1=", "uid": "x7"}], id_column="uid")
    prompts.load(tokenizer)
    assert prompts[0].id == "x7"


# ---------------------------------------------------------------- what is wrong is named


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "2=",}', "expected one JSON object per line, found .* at column"),
        ("[1, 2]", r"expected an object with a 'prompt', got \[1, 2\]"),
        ('{"question": "2="}', r"no column 'prompt' among \['question'\]; set prompt_column"),
        ('{"prompt": 5}', "'prompt' must be a non-empty string or a list .*, got 5"),
        ('{"prompt": ""}', "'prompt' must be a non-empty string"),
        ('{"prompt": []}', "'prompt' must be a non-empty string"),
        ('{"prompt": [{"role": "user"}]}', "'prompt' must be a non-empty string or a list"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, tokenizer, line, message):
    prompts = jsonl(tmp_path / "bad.jsonl", '{"prompt": "1="}', "", line, '{"prompt": "3="}')
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{message}"):
        prompts.load(tokenizer)


def test_a_missing_id_is_named(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1=", "uid": 1}\n{"prompt": "2="}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: no column 'uid' among \['prompt'\]"):
        JSONLPrompts(str(path), id_column="uid").load(tokenizer)


@pytest.mark.parametrize("cls", [JSONLPrompts, ParquetPrompts, HFDatasetPrompts])
def test_a_missing_file_is_named(tmp_path, tokenizer, cls):
    with pytest.raises(DataError, match=r"gone.* does not exist"):
        cls(str(tmp_path / "gone")).load(tokenizer)


def test_a_file_of_another_kind_is_named(tmp_path, tokenizer):
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"text\.parquet: cannot be read: .*footer"):
        ParquetPrompts(str(tmp_path / "text.parquet")).load(tokenizer)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder: not a folder that save_to_disk wrote"):
        HFDatasetPrompts(str(tmp_path / "folder")).load(tokenizer)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data-00000-of-00001.arrow", b""),
        ("data-00000-of-00001.arrow", b"\xff" * 4000),
        ("state.json", b"{"),
        ("state.json", b"[]"),
        ("dataset_info.json", b'{"features": 3}'),
    ],
)
def test_a_damaged_folder_of_save_to_disk_is_named(tmp_path, tokenizer, name, content):
    prompts = from_datasets(tmp_path)
    (tmp_path / "set" / name).write_bytes(content)
    with pytest.raises(DataError, match="set: damaged, or an incomplete copy of what"):
        prompts.load(tokenizer)


def test_bytes_that_are_no_text_are_named(tmp_path, tokenizer):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é="}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:1: expected UTF-8"):
        JSONLPrompts(str(tmp_path / "latin.jsonl")).load(tokenizer)


def test_a_split_that_is_not_there_is_named(tmp_path, tokenizer):
    prompts = from_a_split(tmp_path)
    prompts.split = None
    with pytest.raises(DataError, match=r"split=None is not one of \['test', 'train'\]"):
        prompts.load(tokenizer)


def test_no_rows_are_refused(tokenizer):
    with pytest.raises(DataError, match="holds no rows"):
        IterablePrompts([]).load(tokenizer)


def test_a_prompt_without_tokens_is_refused(tokenizer):
    prompts = IterablePrompts([{"prompt": "abc"}])  # none of its characters is in the vocabulary
    prompts.load(tokenizer)
    with pytest.raises(DataError, match="row 0: the prompt 'abc' has no tokens"):
        prompts.draw(1)


def test_drawing_before_loading_is_refused():
    with pytest.raises(ConfigError, match=r"not loaded yet; call load\(tokenizer\)"):
        IterablePrompts(ROWS).draw(1)


# ---------------------------------------------------------------- chat


def test_a_chat_is_rendered_by_the_tokenizers_own_template(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = CHAT
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "23"}]
    prompts = IterablePrompts([{"prompt": messages}])
    prompts.load(tokenizer)
    (prompt,) = prompts.draw(1)
    # Rendered: "s1;u23;=", of which this vocabulary knows the digits and "=".
    assert prompt.token_ids == [4, 5, 6, 2]
    exact = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    assert prompt.token_ids == list(exact["input_ids"])
    assert prompt.prompt == messages


def test_a_chat_without_a_template_is_refused_before_an_engine_starts(tokenizer):
    prompts = IterablePrompts([{"prompt": [{"role": "user", "content": "1"}]}])
    with pytest.raises(
        DataError, match=r"row 0: .* no chat template; .* put a chat_template.jinja"
    ):
        prompts.load(tokenizer)


def test_a_tokenizer_that_does_not_give_back_its_text_is_told_of_once():
    """LlamaTokenizerFast loses all white space on SmolLM2's files."""
    tokenizer, sound = (chat_tokenizer("qwen2_5") for _ in range(2))
    tokenizer.backend_tokenizer.normalizer = Replace(" ", "")
    rows = [{"prompt": [{"role": "user", "content": "def f(x): return 2 + x"}]}] * 3
    prompts = IterablePrompts(rows)
    told = r"row 0: the tokenizer does not give back .* becomes 'deff\(x\):return2\+x'"
    with pytest.warns(match=told):
        prompts.load(tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompts.draw(5)
        IterablePrompts(rows).load(sound)


def begun(template=CHAT):
    """Make a tokenizer that puts <|begin|> before texts, as Llama's and Gemma's do."""
    tokenizer = chat_tokenizer("llama3_1", template=template)
    begin = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[begin]
    )
    return tokenizer


@pytest.mark.parametrize("text", ["1=", "<|begin|>1=", "<|begin|><|begin|>1="])
def test_a_text_begins_once_whether_it_is_rendered_already_or_not(recwarn, text):
    tokenizer = begun()
    prompts = IterablePrompts([text], max_prompt_tokens=3)
    prompts.load(tokenizer)
    [prompt] = prompts.draw(1)
    assert prompt.token_ids == tokenizer.convert_tokens_to_ids(["<|begin|>", "1", "="])
    assert PromptEncoder(tokenizer).lengths([(text, {})], str).tolist() == [3]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("template", "content", "told"),
    [
        (CHAT, "1", r"row 0: the prompt does not begin with '<\|begin\|>'"),
        ("{{ bos_token }}" + CHAT, "<|begin|>1", r"row 0: the prompt holds '<\|begin\|>' 2 times"),
    ],
)
def test_a_chat_that_does_not_begin_once_is_told_of_once(template, content, told):
    prompts = IterablePrompts([[{"role": "user", "content": content}]] * 2, shuffle=False)
    prompts.load(begun(template))
    with pytest.warns(UserWarning, match=told) as warned:
        prompts.draw(2)
    assert len(warned) == 1


def test_a_chat_whose_template_begins_it_is_not_told_of(recwarn):
    prompts = IterablePrompts([[{"role": "user", "content": "1"}]])
    prompts.load(begun("{{ bos_token }}" + CHAT))
    prompts.draw(2)
    assert not recwarn.list


def test_a_template_is_told_the_day_on_which_the_run_began():
    module = PolicyModule("model")
    module.day.date = "2024-02-29"
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    resumed = PolicyModule("model")
    dated = chat_tokenizer("qwen3", template="{{ strftime_now('%d %b %Y') }}")
    tokenizer = with_chat_variables(dated, {}, resumed.day)
    prompts = IterablePrompts([[{"role": "user", "content": "1"}]])
    prompts.load(tokenizer)
    resumed.on_load_checkpoint(checkpoint)
    assert tokenizer.decode(prompts[0].token_ids) == "29 Feb 2024"


def test_a_run_directory_tells_a_rerun_the_day(tmp_path):
    module = PolicyModule("model")
    module.day.date = "2024-02-29"
    start = SimpleNamespace(is_global_zero=True, ckpt_path=None)
    enter_run(start, module, tmp_path / "checkpoints")
    (tmp_path / "config.yaml").write_text("")
    assert RecordedRun(tmp_path).day == "2024-02-29"


def test_a_directory_is_no_prompt_file(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"is a directory \(it holds train\.jsonl\); name a file"):
        list(JSONLPrompts(str(tmp_path)).read())


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "1\ud800="}, "prompt"),
        ({"prompt": "1=", "answer": {"parts": ["a", "b\udc00"]}}, "answer"),
    ],
)
def test_half_a_character_is_refused_where_it_stands(tmp_path, tokenizer, row, column):
    good = json.dumps({"prompt": "\U0001f600="})  # two halves make one character
    prompts = jsonl(tmp_path / "a.jsonl", good, json.dumps(row))
    with pytest.raises(DataError, match=rf"a\.jsonl:2: column '{column}' holds '.ud[8c]00', half"):
        prompts.load(tokenizer)


# ---------------------------------------------------------------- length


def test_long_prompts_are_dropped_and_counted_once_each(tokenizer):
    prompts = IterablePrompts(ROWS, max_prompt_tokens=3, shuffle=False)
    prompts.load(tokenizer)
    assert [p.prompt for p in prompts.draw(6)] == ["12=", "3=", "7=", "89=", "12=", "3="]
    assert prompts.dropped == 1
    prompts.draw(8)
    assert prompts.dropped == 1  # the same prompt, in another epoch
    assert [p.prompt for p in prompts.first(3)] == ["12=", "3=", "7="]


def test_only_long_prompts_are_refused_instead_of_searched_for_ever(tokenizer):
    prompts = IterablePrompts(ROWS, max_prompt_tokens=1)
    prompts.load(tokenizer)
    with pytest.raises(DataError, match="all 5 prompts are longer than max_prompt_tokens=1"):
        prompts.draw(1)


def test_the_bound_that_prompts_break_is_the_one_that_is_named(tokenizer):
    prompts = IterablePrompts(ROWS)
    prompts.load(tokenizer)
    prompts.bound(1)  # max_prompt_tokens was never set, so it is no fix to raise it
    with pytest.raises(DataError, match=r"longer than the 1 tokens .* raise engine\.max_model_len"):
        prompts.draw(1)
    assert prompts.max_prompt_tokens is None
    prompts = IterablePrompts(ROWS, max_prompt_tokens=1)
    prompts.load(tokenizer)
    prompts.bound(2)
    with pytest.raises(DataError, match="longer than max_prompt_tokens=1; raise it"):
        prompts.draw(1)


# ---------------------------------------------------------------- order and cursor


def loaded(tokenizer, **options) -> IterablePrompts:
    prompts = IterablePrompts(ROWS, **options)
    prompts.load(tokenizer)
    return prompts


def ids(prompts, count: int) -> list[str]:
    return [p.id for p in prompts.draw(count)]


def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(tokenizer):
    prompts = loaded(tokenizer)
    epochs = [ids(prompts, 5) for _ in range(6)]
    for epoch in epochs:
        assert sorted(epoch) == ["0", "1", "2", "3", "4"]
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_follows_the_seed(tokenizer):
    first, again = (ids(loaded(tokenizer, seed=3), 20) for _ in range(2))
    assert first == again
    assert ids(loaded(tokenizer, seed=4), 20) != first


@pytest.mark.parametrize("drawn", [0, 3, 5, 7, 13])
def test_going_on_from_a_state_equals_never_having_stopped(tokenizer, drawn):
    whole = loaded(tokenizer, seed=1, max_prompt_tokens=3)
    ids(whole, drawn)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = loaded(tokenizer, seed=1, max_prompt_tokens=3)
    resumed.load_state_dict(state)
    assert resumed.dropped == whole.dropped
    assert ids(resumed, 12) == ids(whole, 12)


def test_a_state_of_another_order_is_refused(tokenizer):
    state = loaded(tokenizer, seed=1).state_dict()
    with pytest.raises(ConfigError, match=r"seed=1, now it is 2; restore it to resume"):
        loaded(tokenizer, seed=2).load_state_dict(state)


def test_a_state_of_a_longer_dataset_is_refused(tokenizer):
    prompts = loaded(tokenizer)
    ids(prompts, 4)
    fewer = IterablePrompts(ROWS[:3])
    fewer.load(tokenizer)
    with pytest.raises(ConfigError, match=r"were 5 rows, now .* holds 3"):
        fewer.load_state_dict(prompts.state_dict())


def test_where_a_row_stands_is_looked_up_for_errors_alone(tmp_path, tiny_model, monkeypatch):
    """A file is read from its beginning to count its lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1="}\n{"prompt": "2="}\n')
    prompts = JSONLPrompts(str(path), max_prompt_tokens=8)
    prompts.load(load_tokenizer(str(tiny_model)))
    asked = []
    monkeypatch.setattr(JSONLTable, "where", lambda table, index: asked.append(index) or "here")
    assert len(prompts.draw(4)) == 4
    assert asked == []
