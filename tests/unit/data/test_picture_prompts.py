"""Prompts with pictures: from every source, in every form; one that is broken costs one prompt."""

import base64
import json

import pytest
from PIL import Image

from lightning_rl.data.sources import (
    HFDatasetPrompts,
    IterablePrompts,
    JSONLPrompts,
    ParquetPrompts,
)
from lightning_rl.data.streaming import HFStreamingPrompts
from lightning_rl.data.supervised import supervised_rollout
from lightning_rl.errors import DataError
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.vision.limits import PictureLimits
from tests.support.tiny_vision import png, save_vision_model

PLACE = {"type": "image"}


RED, BLUE = png("red"), png("blue", 64, 32)  # 4 and 8 tokens
URI = "data:image/png;base64," + base64.b64encode(RED).decode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "red.png").write_bytes(RED)
    (tmp_path / "pics" / "blue.png").write_bytes(BLUE)
    return tmp_path


def ask(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]


def jsonl(folder, *rows, **options):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JSONLPrompts(str(path), shuffle=False, **options)


def loaded(prompts, tokenizer):
    prompts.load(tokenizer)
    return prompts


def require_both(prompt, tokenizer):
    """Require the prompt that shows RED, then BLUE, then asks."""
    assert [one.data for one in prompt.pictures] == [RED, BLUE]
    assert prompt.prompt == ask(PLACE, PLACE)
    pad, end = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_end|>"])
    first, second = prompt.places
    assert prompt.token_ids[first : first + 5] == [pad] * 4 + [end]
    assert prompt.token_ids[second : second + 9] == [pad] * 8 + [end]
    assert prompt.token_ids.count(pad) == 12
    assert prompt.columns == {"answer": "red"}


FORMS = {
    "a column, with places": {
        "prompt": ask(PLACE, PLACE),
        "images": ["pics/red.png", "pics/blue.png"],
    },
    "a column, without": {
        "prompt": [{"role": "user", "content": "Which?"}],
        "images": [URI, {"path": "pics/blue.png", "bytes": None}],
    },
    "content parts": {
        "prompt": ask(
            {"type": "image_url", "image_url": {"url": URI}},
            {"type": "image", "path": "pics/blue.png"},
        )
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_jsonl_names_pictures_in_a_column_or_in_the_chat(folder, tokenizer, form, monkeypatch):
    monkeypatch.chdir("/")  # paths are relative to the file
    prompts = loaded(jsonl(folder, FORMS[form] | {"answer": "red"}), tokenizer)
    require_both(prompts.draw(1)[0], tokenizer)


def image_rows(folder):
    import datasets

    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    row = {
        "prompt": [{"role": "user", "content": "Which?"}],
        "images": [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": None}],
        "answer": "red",
    }
    return datasets.Dataset.from_list([row, row], features=features)


def from_parquet(folder):
    image_rows(folder).to_parquet(folder / "rows.parquet")
    return ParquetPrompts(str(folder / "rows.parquet"), shuffle=False)


def from_disk(folder):
    image_rows(folder).save_to_disk(folder / "set")
    return HFDatasetPrompts(str(folder / "set"), shuffle=False)


def from_stream(folder):
    image_rows(folder).to_parquet(folder / "rows.parquet")
    return HFStreamingPrompts(str(folder / "rows.parquet"), shuffle=False)


def from_memory(folder):
    return IterablePrompts(image_rows(folder), shuffle=False)


def from_arrow(folder):
    return IterablePrompts(image_rows(folder).with_format("arrow")[:].to_pylist(), shuffle=False)


SOURCES = [from_parquet, from_disk, from_stream, from_memory, from_arrow]


@pytest.mark.parametrize("source", SOURCES)
def test_image_columns_of_datasets(folder, tokenizer, source, monkeypatch):
    prompts = source(folder)
    decoded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: decoded.append(self) or None)
    prompts.load(tokenizer)
    monkeypatch.undo()
    assert not decoded  # they are read when they are drawn
    for prompt in prompts.draw(2):
        require_both(prompt, tokenizer)


def test_one_picture_in_a_column_of_another_name(folder, tokenizer):
    row = {"prompt": [{"role": "user", "content": "Which?"}], "photo": "pics/red.png"}
    [prompt] = loaded(jsonl(folder, row, images_column="photo"), tokenizer).draw(1)
    assert [one.data for one in prompt.pictures] == [RED]
    assert prompt.prompt == ask(PLACE)
    assert prompt.columns == {}


def test_rows_without_pictures_are_as_they_were(folder, tokenizer):
    chat = [{"role": "user", "content": "Which?"}]
    rows = [{"prompt": chat, "images": None}, {"prompt": chat, "images": []}, {"prompt": "Which?"}]
    for prompt, row in zip(loaded(jsonl(folder, *rows), tokenizer).draw(3), rows, strict=True):
        assert prompt.prompt == row["prompt"]
        assert (prompt.pictures, prompt.places) == ([], [])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("pics/none.png", "pics/none.png does not exist"),
        ("pics/cut.png", "cannot be decoded"),
        ("pics/page.png", "is not a PNG, JPEG, WebP or GIF"),
        ("pics/large.png", r"200×200 = 40,000 pixels, more than max_pixels=10,000"),
        ("http://127.0.0.1:1/x.png", "cannot be downloaded"),
    ],
)
def test_a_broken_picture_costs_one_prompt_and_one_message(folder, tokenizer, source, words):
    (folder / "pics" / "cut.png").write_bytes(RED[:60])
    (folder / "pics" / "page.png").write_bytes(b"<html>")
    (folder / "pics" / "large.png").write_bytes(png("red", 200, 200))
    rows = [{"prompt": ask(PLACE), "images": [name]} for name in ("pics/red.png", source, URI)]
    limits = PictureLimits(max_pixels=10_000, retries=0)
    prompts = loaded(jsonl(folder, *rows, picture_limits=limits), tokenizer)
    with pytest.warns(UserWarning, match=rf"rows.jsonl:2 is left out: .*{words}") as told:
        drawn = prompts.draw(4)  # two epochs
    assert [prompt.id for prompt in drawn] == ["0", "2", "0", "2"]
    assert len([w for w in told if "left out" in str(w.message)]) == 1
    assert prompts.dropped == 1
    assert [prompt.id for prompt in prompts.first()] == ["0", "2"]


def test_a_set_of_which_no_picture_can_be_had_is_an_error(folder, tokenizer):
    rows = [{"prompt": ask(PLACE), "images": [f"{n}.png"]} for n in range(2)]
    prompts = loaded(jsonl(folder, *rows), tokenizer)
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(DataError, match="of 2 prompts 2 have pictures that cannot be read"),
    ):
        prompts.draw(1)


def test_pictures_count_for_the_length_of_a_prompt(folder, tokenizer):
    rows = [{"prompt": ask(PLACE), "images": [name]} for name in ("pics/blue.png", "pics/red.png")]
    lengths = [len(p.token_ids) for p in loaded(jsonl(folder, *rows), tokenizer).draw(2)]
    assert lengths[0] - lengths[1] == 4
    prompts = loaded(jsonl(folder, *rows, max_prompt_tokens=lengths[1]), tokenizer)
    assert [prompt.id for prompt in prompts.draw(2)] == ["1", "1"]


def test_a_picture_for_a_model_that_reads_none_says_so(folder, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{% for m in messages %}1{% endfor %}="
    prompts = loaded(jsonl(folder, {"prompt": ask(PLACE), "images": [URI]}), tokenizer)
    with (
        pytest.warns(UserWarning, match=r"the model reads none; use one of Qwen2_5_VL"),
        pytest.raises(DataError, match="cannot be read"),
    ):
        prompts.draw(1)


def test_a_completion_to_imitate_keeps_the_pictures(folder, tokenizer):
    row = FORMS["a column, with places"] | {"completion": "red"}
    [prompt] = loaded(jsonl(folder, row), tokenizer).draw(1)
    [made] = supervised_rollout(prompt, "completion", tokenizer).rows
    assert (made.pictures, made.places) == (prompt.pictures, prompt.places)
    assert all(made.loss_mask)
