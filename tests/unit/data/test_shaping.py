"""Any row becomes a prompt or a chat: columns, template, system, filter and map."""

import json
from pathlib import Path

import pytest

from lightning_rl import (
    HFDatasetPrompts,
    IterablePrompts,
    JSONLPrompts,
    PassRateCurriculum,
    RLDataModule,
)
from lightning_rl.cli.trust import TRUSTED, require_trusted
from lightning_rl.cli.trusted_texts import kind_of
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.models.tokenizer import load_tokenizer

ROWS = [{"question": str(n), "answer": f"= {n}", "level": n % 3} for n in range(9)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    return tokenizer


def loaded(tokenizer, rows=ROWS, **options):
    prompts = IterablePrompts(rows, shuffle=False, **options)
    prompts.load(tokenizer)
    return prompts


def easy(row):
    return row["level"] == 0


def doubled(row):
    row["prompt"] = row.pop("question") * 2  # in place, as many write it
    return row


def broken(row):
    return row["no such column"]


def test_columns_get_the_names_that_prompts_and_rewards_want(tokenizer):
    [prompt, *_] = loaded(tokenizer, columns={"prompt": "question", "solution": "answer"}).draw(1)
    assert (prompt.prompt, prompt.columns) == ("0", {"solution": "= 0", "level": 0})
    swapped = loaded(tokenizer, [{"prompt": "1", "other": "2"}], columns={"prompt": "other"})
    assert swapped[0].prompt == "2"


def test_a_template_is_jinja_in_which_braces_of_latex_stand_as_they_are(tokenizer):
    template = "{{ question }} in \\boxed{}.{% if level %} Level {{ level }}{% endif %}\n"
    prompts = loaded(tokenizer, template=template)
    assert prompts[0].prompt == "0 in \\boxed{}.\n"
    assert prompts[1].prompt == "1 in \\boxed{}. Level 1\n"
    assert prompts[1].columns == ROWS[1]


def test_a_system_message_makes_a_chat(tokenizer):
    system, user = {"role": "system", "content": "Add."}, {"role": "user", "content": "1"}
    options = {"columns": {"prompt": "question"}}
    assert loaded(tokenizer, system="Add.", **options)[1].prompt == [system, user]
    assert loaded(tokenizer, chat=True, **options)[1].prompt == [user]
    assert loaded(tokenizer, **options)[1].prompt == "1"
    chat = loaded(tokenizer, [{"prompt": [user]}], system="Add.")
    assert chat[0].prompt == [system, user]


def test_filter_sees_rows_as_they_are_and_map_what_is_kept(tokenizer):
    prompts = loaded(tokenizer, filter=easy, map=doubled)
    assert len(prompts) == 3
    drawn = prompts.draw(6)
    assert [p.prompt for p in drawn] == ["00", "33", "66"] * 2  # each time from the row as it was
    assert [p.prompt for p in prompts.first(2)] == ["00", "33"]
    assert ROWS[3]["question"] == "3"


def test_rows_of_a_curriculum_are_shaped_by_what_it_wraps(tokenizer):
    inner = IterablePrompts(ROWS, filter=easy, template="{{ question }}=")
    curriculum = PassRateCurriculum(inner)
    curriculum.load(tokenizer)
    assert {p.prompt for p in curriculum.draw(3)} == {"0=", "3=", "6="}


def test_what_does_not_fit_the_rows_is_named(tokenizer):
    for options, message in (
        ({"columns": {"prompt": "query"}}, r"row 0: no column 'query' among \['answer', 'level', "),
        ({"template": "{{ query }}"}, r"row 0: template: 'query' is undefined; the columns are \["),
        ({"map": broken}, "row 0: map=broken fails on .*KeyError: 'no such column'"),
        ({"filter": broken}, "row 0: filter=broken fails on .*KeyError: 'no such column'"),
        ({"map": str}, "row 0: expected an object with a 'prompt', got"),
        ({"template": "{{ level + answer }}"}, "row 0: template: unsupported operand"),
        ({"filter": bool, "map": doubled, "prompt_column": "x"}, "row 0: no column 'x' among"),
    ):
        with pytest.raises(DataError, match=message):
            loaded(tokenizer, **options)
    with pytest.raises(DataError, match="holds no rows"):
        loaded(tokenizer, filter=lambda row: False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question}", r"names no column, so all prompts would be the same; write .*\{\{ question"),
        ("{{ question", "cannot be read as Jinja: .*end of print statement"),
        ("{{ ''.__class__.__mro__ }}{{ question }}", None),
    ],
)
def test_a_template_that_cannot_be_meant_is_refused(tokenizer, template, message):
    if message is None:  # it is data, and reaches nothing else
        with pytest.raises(DataError, match="template: access to attribute '__class__'"):
            loaded(tokenizer, template=template)
        return
    with pytest.raises(ConfigError, match=message):
        IterablePrompts(ROWS, template=template)


def test_all_of_it_can_be_configured(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "my_rows.py").write_text("def odd(row):\n    return row['level'] == 1\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.syspath_prepend(tmp_path)
    told = {
        "class_path": "JSONLPrompts",
        "init_args": {
            "path": str(tmp_path / "rows.jsonl"),
            "filter": "my_rows.odd",
            "template": "{{ question }}=",
            "columns": {"solution": "answer"},
            "shuffle": False,
        },
    }
    data = RLDataModule(told, rewards=[len])
    data.train_prompts.load(tokenizer)
    [prompt] = data.train_prompts.draw(1)
    assert (prompt.prompt, prompt.columns["solution"]) == ("1=", "= 1")


def test_code_is_only_taken_from_who_is_trusted():
    for argument in ("filter", "map"):
        assert kind_of(HFDatasetPrompts, argument) == "imported"
        tree = {"class_path": "HFDatasetPrompts", "init_args": {argument: "tests.support.lots.x"}}
        with pytest.raises(ConfigError, match=rf"init_args\.{argument}: 'tests\.support\.lots\.x'"):
            require_trusted(tree, TRUSTED)
    assert kind_of(JSONLPrompts, "template") == "data"


def test_text_of_a_path_is_the_same_as_a_path(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\n1=,1\n")
    for given in (tmp_path / "rows.csv", str(tmp_path / "rows.csv")):
        data = RLDataModule(given, rewards=[len])
        assert isinstance(data.train_prompts, HFDatasetPrompts)
        assert Path(data.train_prompts.path).name == "rows.csv"
