"""Test rows of a data set: with pictures they are read when they are needed."""

import json

import pytest

from lightning_rl import JSONLPrompts, SFTDataModule
from lightning_rl.learn.dpo import PairDataModule
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import Rollout
from lightning_rl.vision.loading import decode
from tests.support.tiny_vision import picture, save_vision_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")))


@pytest.fixture
def prompts(tmp_path, tokenizer):
    """Return two rows with a picture, and one without."""
    decode(picture(1)).save(tmp_path / "1.png")
    shown = [{"type": "image", "image": "1.png"}, {"type": "text", "text": "What?"}]
    lines = [
        {"prompt": [{"role": "user", "content": content}], "good": "seven", "bad": "one"}
        for content in (shown, "What?", shown)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = JSONLPrompts(str(tmp_path / "rows.jsonl"))
    prompts.load(tokenizer)
    return prompts


def data_of(kind, prompts, tokenizer, **columns):
    data = kind(prompts, **columns)
    data._tokenizer = tokenizer
    return data


def test_rows_are_those_of_all_prompts(prompts, tokenizer):
    data = data_of(SFTDataModule, prompts, tokenizer, completion_column="good")
    rows = data.rows(prompts)
    expected = [data.row(prompt) for prompt in prompts.first()]
    assert [row.to_dict() for row in rows] == [row.to_dict() for row in expected]
    assert len(rows) == 3
    assert [len(row.prompt.pictures) for row in rows] == [1, 0, 1]
    assert len(data.collate(list(rows))["rollouts"]) == 3


def test_pairs_are_too(prompts, tokenizer):
    columns = {"chosen_column": "good", "rejected_column": "bad"}
    data = data_of(PairDataModule, prompts, tokenizer, **columns)
    for (good, bad), prompt in zip(data.rows(prompts), prompts.first(), strict=True):
        assert (good.completion, bad.completion) == ("seven", "one")
        assert good.prompt.pictures == prompt.pictures


def test_no_picture_is_held(prompts, tokenizer):
    data = data_of(SFTDataModule, prompts, tokenizer, completion_column="good")
    rows = data.rows(prompts)
    assert [isinstance(row, Rollout) for row in rows._rows] == [False, True, False]
    assert rows[1] is rows[1]
    assert rows[0].rows[0].pictures[0].data == rows[2].prompt.pictures[0].data
