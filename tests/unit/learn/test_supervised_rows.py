"""Test rows of supervised training: what people write, read alike by all learners and by RL.

The matrix: each learner, kind of row and chat template. The tokens are those of the template's own
rendering, the mask is that of the template's ``{% generation %}`` where it has one, and the prompt
is the one that RL continues.
"""

import json

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.data.implied_prompts import ImpliedPrompts
from lightning_rl.data.sources import (
    HFDatasetPrompts,
    IterablePrompts,
    JSONLPrompts,
    ParquetPrompts,
)
from lightning_rl.data.supervised import RowLimit, conversation
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.learn.dpo import DPOModule, PairDataModule
from lightning_rl.learn.kto import KTODataModule
from lightning_rl.learn.reward_model import RewardModelModule, RewardPairDataModule
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from lightning_rl.models.reward_model import scored_text
from lightning_rl.models.tokenizer import load_tokenizer
from tests.support.chats import TOOL
from tests.support.small_run import fit
from tests.support.tiny_models import chat_tokenizer, save_chat_model

TEMPLATES = ("qwen2_5", "qwen3", "llama3_1", "gemma", "mistral", "deepseek_r1_distill")
ASK = {"role": "user", "content": "2 + 2?"}
MORE = {"role": "user", "content": "And 1 more?"}
GENERATION = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def rows_of(kind, tokenizer):
    """Return a row for each learner: its columns, and a better and a worse completion."""
    ask, end = [ASK], end_tokens_of(tokenizer).turn
    kinds = {
        "text": ({"prompt": ask}, "4.", "5."),
        "ids": ({"prompt": ask}, [52, 46, end], [53, 46, end]),
        "messages": ({"prompt": ask}, [said("4.")], [said("5.")]),
        "several turns": (
            {"prompt": ask},
            [said("4."), MORE, said("5.")],
            [said("4."), MORE, said("6.")],
        ),
        "implied": ({}, [ASK, said("4.")], [ASK, said("5.")]),
        "repeated": ({"prompt": ask}, [ASK, said("4.")], [ASK, said("5.")]),
        "binarised": ({"prompt": "2 + 2?"}, [ASK, said("4.")], [ASK, said("5.")]),
        "prefilled": ({"prompt": [ASK, said("It is")]}, " 4.", " 5."),
        "prefilled messages": ({"prompt": [ASK, said("It is")]}, [said(" 4.")], [said(" 5.")]),
        "tools": ({"prompt": ask, "tools": json.dumps([TOOL])}, [said("4.")], [said("5.")]),
        "variables": (
            {"prompt": ask, "chat_template_kwargs": {"enable_thinking": False, "other": None}},
            [said("4.")],
            [said("5.")],
        ),
    }
    return kinds[kind]


KINDS = ("text", "ids", "messages", "several turns", "implied", "repeated", "binarised")
KINDS = (*KINDS, "prefilled", "prefilled messages", "tools", "variables")


def loaded_rows(data, tokenizer):
    """Load the rows of a learner's data."""
    data._tokenizer = tokenizer
    data.train.imply(data.implied())
    data.train.load(tokenizer)


def loaded(data, tokenizer):
    """Return the prompt of a row as a learner reads it, and what the learner makes of it."""
    loaded_rows(data, tokenizer)
    [prompt] = data.train.first()
    return prompt, data.row(prompt)


def learned(tokenizer, kind):
    """Return the better completion of one row as SFT, KTO, DPO and the reward model read it."""
    columns, good, bad = rows_of(kind, tokenizer)
    one = IterablePrompts([{**columns, "completion": good, "label": True}])
    two = IterablePrompts([{**columns, "chosen": good, "rejected": bad}])
    prompt, sft = loaded(SFTDataModule(one), tokenizer)
    _, kto = loaded(KTODataModule(one), tokenizer)
    _, (chosen, rejected) = loaded(PairDataModule(two), tokenizer)
    paired, (texts, _) = loaded(RewardPairDataModule(two), tokenizer)
    return prompt, sft, kto, chosen, rejected, paired, texts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_learner_reads_every_row_as_the_template_writes_it(template, kind):
    tokenizer = chat_tokenizer(template)
    columns, good, _ = rows_of(kind, tokenizer)
    prompt, sft, kto, chosen, rejected, paired, texts = learned(tokenizer, kind)
    [row] = sft.rows
    # All learners agree, and so does RL, which continues the same tokens.
    for other in (kto, chosen):
        assert (other.rows[0].prompt_ids, other.token_ids, other.loss_mask) == (
            row.prompt_ids,
            row.token_ids,
            row.loss_mask,
        )
    rl = IterablePrompts([{**columns, "prompt": prompt.asked}])
    rl.load(tokenizer)
    assert rl[0].token_ids == prompt.token_ids
    assert (rl[0].prompt, rl[0].begun) == (prompt.prompt, prompt.begun)
    # The tokens are the template's rendering of the whole, up to the end of the last turn.
    follows = good if isinstance(good, str) else None
    if kind not in ("text", "ids", "prefilled"):
        chat = conversation(prompt, prompt.columns["completion"])
        variables = {"tools": [TOOL]} if kind == "tools" else {}
        variables |= {"enable_thinking": False} if kind == "variables" else {}
        whole = tokenizer.apply_chat_template(chat, tokenize=False, **variables)
        text = tokenizer.decode(row.prompt_ids + row.token_ids)
        assert whole.startswith(text)
        assert whole[len(text) :].strip() == ""
        options = {"tools": [TOOL]} if kind == "tools" else {}
        follows = chat[len(prompt.prompt) :]
        options |= {"enable_thinking": False} if kind == "variables" else {}
        assert texts[0] == scored_text(tokenizer, prompt.prompt, follows, options=options)
    elif kind != "ids":
        assert tokenizer.decode(row.token_ids[:-1]) == follows
        assert row.prompt_ids == prompt.token_ids
    # Each trained stretch is a turn with its end; nothing of the user's is trained.
    trained = [t for t, mine in zip(row.token_ids, row.loss_mask, strict=True) if mine]
    assert trained[-1] in end_tokens_of(tokenizer).token_ids
    assert "more" not in tokenizer.decode(trained)
    count = 2 if kind == "several turns" else 1
    assert sum(token in end_tokens_of(tokenizer).token_ids for token in trained) == count
    assert chosen.token_ids != rejected.token_ids
    assert paired.token_ids == prompt.token_ids or kind == "several turns"


SPELL = {
    "name": "spell",
    "parameters": {"type": "object", "properties": {"word": {"enum": ["a", "b"]}}, "required": []},
}
TOOLS_OF_ROWS = ([TOOL], [{"type": "function", "function": SPELL}, TOOL], [], None)


def written(rows, form, folder):
    """Return how prompts are read from a file of this form, which it writes."""
    if form == "hub":
        Dataset.from_list(rows).save_to_disk(folder / "rows")
        return lambda: HFDatasetPrompts(str(folder / "rows"))
    if form.startswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
        return lambda: ParquetPrompts(str(folder / "rows.parquet"))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda: JSONLPrompts(str(folder / "rows.jsonl"))


@pytest.mark.parametrize("form", ["jsonl", "jsonl of text", "parquet", "parquet of text", "hub"])
def test_each_row_has_its_own_tools_in_whatever_file(form, tmp_path):
    """Tables of Arrow give every tool the arguments of all, with null."""
    tokenizer = chat_tokenizer("qwen2_5")
    answers = {"completion": [said("4.")], "chosen": [said("4.")], "rejected": [said("5.")]}
    columns = [{"tools": json.dumps(t) if "text" in form else t} for t in TOOLS_OF_ROWS]
    rows = [{"prompt": [ASK], **answers, "label": True, **more} for more in columns]
    read = written(rows, form, tmp_path)
    prompts = read()
    prompts.load(tokenizer)
    learners = [SFTDataModule, KTODataModule, PairDataModule, RewardPairDataModule]
    datas = [learner(read()) for learner in learners]
    for data in datas:
        loaded_rows(data, tokenizer)
    for place, tools in enumerate(TOOLS_OF_ROWS):
        chat = {"conversation": [ASK, said("4.")], "tools": tools or None}
        whole = tokenizer.apply_chat_template(**chat, tokenize=False)
        assert whole.startswith(tokenizer.decode(prompts[place].token_ids))
        sft, kto, (chosen, _), ((scored, _), _) = [data.row(data.train[place]) for data in datas]
        texts = [[*one.rows[0].prompt_ids, *one.token_ids] for one in (sft, kto, chosen)]
        for token_ids in (*texts, scored):
            assert tokenizer.decode(token_ids).strip() == whole.strip()


def test_masks_are_those_of_a_template_that_marks_what_the_model_wrote():
    tokenizer = chat_tokenizer("qwen2_5", template=GENERATION)
    chat = [{"role": "system", "content": "Be brief."}, ASK, said("4."), MORE, said("It is 5.")]
    prompts = IterablePrompts([{"messages": chat}])
    _, rollout = loaded(SFTDataModule(prompts), tokenizer)
    own = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    [row] = rollout.rows
    token_ids, mask = row.prompt_ids + row.token_ids, [False] * len(row.prompt_ids) + row.loss_mask
    assert token_ids == own["input_ids"][: len(token_ids)]
    assert mask == [bool(m) for m in own["assistant_masks"]][: len(mask)]
    assert not any(own["assistant_masks"][len(mask) :])


def texts_trained(tokenizer, row, **options):
    prompts = IterablePrompts([row])
    _, rollout = loaded(SFTDataModule(prompts, **options), tokenizer)
    stretches, before = [], False
    for token, mine in zip(rollout.token_ids, rollout.loss_mask, strict=True):
        if mine and not before:
            stretches.append([])
        if mine:
            stretches[-1].append(token)
        before = mine
    return [tokenizer.decode(stretch) for stretch in stretches]


def test_an_argument_and_weights_say_which_turns_are_trained():
    tokenizer = chat_tokenizer("qwen2_5")
    chat = [ASK, said("4."), MORE, said("5.")]
    end = "<|im_end|>"
    assert texts_trained(tokenizer, {"messages": chat}) == [f"4.{end}", f"5.{end}"]
    some = [ASK, said("4.", weight=0), MORE, said("5.", weight=1)]
    assert texts_trained(tokenizer, {"messages": some}) == [f"5.{end}"]
    both = texts_trained(tokenizer, {"messages": chat}, trained_roles=["user", "assistant"])
    assert both == [f"4.{end}", f"And 1 more?{end}", f"5.{end}"]
    with pytest.raises(DataError, match=r"none of its turns \(user\) is trained; trained_roles"):
        texts_trained(tokenizer, {"prompt": [ASK], "completion": [MORE]})


def test_calls_of_tools_are_trained_and_their_results_are_not():
    tokenizer = chat_tokenizer("qwen2_5")
    function = {"name": "add", "arguments": json.dumps({"a": 2})}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "4"}
    chat = [ASK, said(None, tool_calls=calls), result, said("4.")]
    trained = texts_trained(tokenizer, {"messages": chat, "tools": [TOOL]})
    asked = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert trained == [asked, "4.<|im_end|>"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Human: Hi\n\nAssistant: Yes.", "Human: Hi\n\nAssistant: You.", "Human: Hi\n\nAssistant:"),
        ("Q: 1\nA: 2", "Q: 1\nA: 33", "Q: 1\nA:"),
        ([ASK, said("a")], [ASK, said("b")], [ASK]),
        ([ASK, said("a"), MORE, said("b")], [ASK, said("a"), MORE, said("c")], None),
    ],
)
def test_a_pairs_prompt_is_what_both_begin_with(chosen, rejected, prompt):
    shared = prompt or [ASK, said("a"), MORE]
    implied = ImpliedPrompts(("chosen", "rejected"))
    row = implied({"chosen": chosen, "rejected": rejected}, "prompt")
    assert row["prompt"] == shared
    assert row["chosen"] == chosen[len(shared) :]
    assert row["rejected"] == rejected[len(shared) :]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "2?", "completion": [said("4.")]}, "its prompt is a text; set chat: true"),
        ({"prompt": [ASK, said("It")], "completion": [MORE]}, "must begin with its rest"),
        ({"prompt": [ASK], "completion": {"a": 1}}, "a string, a list of token ids or, after a"),
        ({"prompt": [ASK], "completion": "4", "tools": "hammer"}, "'tools' is read as a list of"),
        ({"prompt": [ASK], "completion": "4", "tools": ["add"]}, "'tools' is read as a list of"),
        (
            {"prompt": [ASK], "completion": "4", "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs.tokenize is set by the library",
        ),
    ],
)
def test_what_cannot_be_read_is_named(row, match):
    with pytest.raises(DataError, match=match):
        texts_trained(chat_tokenizer("qwen2_5"), row)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Make a model of 2048 positions with Qwen2.5's chats."""
    directory = tmp_path_factory.mktemp("model")
    save_chat_model(directory, "qwen2_5")
    return directory


def test_first_rows_are_read_before_the_weights(model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    load_tokenizer(str(model)).save_pretrained(tmp_path)  # without any weights
    rows = [{"prompt": [ASK], "completion": "4."}, {"prompt": [ASK], "completion": 4}]
    with pytest.raises(DataError, match=r"row 1: 'completion' must be a string"):
        fit(SFTModule(str(tmp_path)), SFTDataModule(rows), tmp_path / "run", max_epochs=1)


LONG = "4" * 3000


@pytest.mark.parametrize(
    ("module", "data", "row"),
    [
        (SFTModule, SFTDataModule, {"prompt": [ASK], "completion": LONG}),
        (SFTModule, SFTDataModule, {"messages": [ASK, said(LONG)]}),
        (DPOModule, PairDataModule, {"prompt": [ASK], "chosen": "4", "rejected": LONG}),
        (
            RewardModelModule,
            RewardPairDataModule,
            {"prompt": [ASK], "chosen": "4", "rejected": LONG},
        ),
    ],
)
def test_rows_beyond_the_models_positions_are_refused_by_name(model, tmp_path, module, data, row):
    match = r"row 0 has 3\d\d\d tokens, more than the 2048 positions.*or set max_length: 2048"
    with pytest.raises(DataError, match=match):
        fit(module(str(model)), data([row]), tmp_path, max_epochs=1)


def test_rows_are_cut_where_the_user_says_so_and_counted_once(model, tmp_path):
    rows = [
        {"prompt": [ASK], "completion": "4."},
        {"prompt": [ASK], "completion": LONG},
        {"prompt": [{"role": "user", "content": LONG}], "completion": "4."},
    ]
    data = SFTDataModule(rows, max_length=1000)
    told = r"of 3 rows 1 are cut and 1 are left out, being longer than max_length=1000"
    with pytest.warns(match=told) as warned:
        fit(SFTModule(str(model)), data, tmp_path, max_epochs=1)
    assert sum("max_length" in str(one.message) for one in warned) == 1
    assert sorted(row.rows[0].length for row in data.rows(data.train))[-1] == 1000


def test_a_limit_beyond_the_positions_is_refused():
    with pytest.raises(ConfigError, match="max_length=4096 is more than the 2048 positions"):
        RowLimit(2048, 4096)
