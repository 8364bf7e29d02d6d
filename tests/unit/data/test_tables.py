"""Rows stay on the disk: read one by one, measured once, the same prompts as from memory."""

import json
import os
import pickle
import zipfile
from functools import partial

import fsspec
import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from lightning_rl import (
    HFDatasetPrompts,
    HFStreamingPrompts,
    IterablePrompts,
    JSONLPrompts,
)
from lightning_rl.data import shaping
from lightning_rl.data.sources import prompts_of
from lightning_rl.data.tables import JSONLTable
from lightning_rl.errors import DataError
from lightning_rl.models.tokenizer import load_tokenizer
from tests.support.tiny_models import CHATML, byte_tokenizer

ROWS = [{"prompt": "7" * (n % 4 + 1) + "=", "answer": str(n)} for n in range(23)]


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


@pytest.fixture
def many(monkeypatch):
    """Let a few rows count as many."""
    monkeypatch.setattr(shaping, "KEPT_FROM", 10)


def written(folder, kind):
    dataset, path = Dataset.from_list(ROWS), folder / f"rows.{kind}"
    if kind == "csv":
        dataset.to_csv(path)
    elif kind == "tsv":
        dataset.to_csv(path, sep="\t")
    elif kind == "parquet":
        dataset.to_parquet(path)
    elif kind == "arrow":
        dataset.save_to_disk(folder / "saved")
        next((folder / "saved").glob("*.arrow")).rename(path)
    else:
        dataset.to_json(path)
    return path


def loaded(tokenizer, prompts):
    prompts.load(tokenizer)
    return prompts


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv", "tsv", "arrow"])
def test_a_file_of_any_kind_is_a_path(tmp_path, tokenizer, kind):
    path = written(tmp_path, kind)
    found = loaded(tokenizer, prompts_of(path)).first()
    assert [prompt.prompt for prompt in found] == [row["prompt"] for row in ROWS]


def test_a_folder_of_files_and_slices_of_its_splits(tmp_path, tokenizer):
    for name, rows in (("train", ROWS), ("test", ROWS[:4])):
        Dataset.from_list(rows).to_json(tmp_path / f"{name}.jsonl")
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:4])).save_to_disk(
        tmp_path / "saved"
    )
    for folder in (tmp_path / "saved", tmp_path):
        prompts = loaded(tokenizer, HFDatasetPrompts(str(folder), split="train[:50%]+test"))
        assert [p.columns["answer"] for p in prompts.first()] == [
            *map(str, [*range(12), *range(4)])
        ]
        with pytest.raises(DataError, match=r"split='dev' is not one of \['test', 'train'\]"):
            HFDatasetPrompts(str(folder), split="dev").load(tokenizer)
        with pytest.raises(DataError, match=r"revision='v1' does not apply; remove it"):
            HFDatasetPrompts(str(folder), revision="v1").load(tokenizer)


@pytest.mark.parametrize("kind", ["gzip", "bz2", "xz", "zip"])
@pytest.mark.parametrize("place", ["folder", "misnamed"])
def test_a_small_file_that_holds_gigabytes_is_refused_before_it_is_read(
    tmp_path, tokenizer, monkeypatch, kind, place
):
    monkeypatch.setattr("lightning_rl.data.compressed._ENOUGH", 100_000)  # else 1 GiB
    file = tmp_path / {"folder": f"train.jsonl.{kind}", "misnamed": "train.json"}[place]
    path = str(tmp_path if place == "folder" else file)

    def write(prompts):
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        if kind == "zip":
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("train.json", lines)
        else:
            with fsspec.open(str(file), "wb", compression=kind) as stream:
                stream.write(lines.encode())

    write(["a" * 1000] * 3000)
    with pytest.raises(DataError, match=r"train\.json.* MiB hold more than .* decompress the file"):
        HFDatasetPrompts(path).load(tokenizer)
    write([f"{'a' * 1000}{number * 7919}" for number in range(80)])  # at most the bound
    assert len(loaded(tokenizer, HFDatasetPrompts(path)).first(80)) == 80


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    """A home may be read-only; the data themselves can be read."""
    (tmp_path / "home").write_text("no folder")
    cache = tmp_path / "home" / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    for kind in ("json", "parquet", "csv"):
        words = rf"rows\.{kind}: the cache of datasets, {cache}, cannot be written .*set HF_HOME"
        with pytest.raises(DataError, match=words):
            HFDatasetPrompts(str(written(tmp_path, kind))).table()


def test_a_dataset_in_python_stays_where_it_is(tmp_path, tokenizer):
    Dataset.from_list(ROWS).save_to_disk(tmp_path)
    dataset = Dataset.load_from_disk(tmp_path)
    prompts = loaded(tokenizer, prompts_of(dataset))
    assert prompts.first()[3].columns == {"answer": "3"}


# ---------------------------------------------------------------- lines of a file


def test_a_file_that_changes_under_a_run_is_refused(tmp_path, tokenizer):
    path = written(tmp_path, "jsonl")
    prompts = loaded(tokenizer, JSONLPrompts(str(path)))
    path.with_suffix(".new").write_text("{}\n")
    os.replace(path.with_suffix(".new"), path)  # another file: the run reads the one that it knows
    assert len(prompts.draw(23)) == 23
    prompts = loaded(tokenizer, JSONLPrompts(str(written(tmp_path, "jsonl"))))
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match=r"rows\.jsonl changed while it was being read; start"):
        prompts.draw(1)


def test_lines_are_found_again_in_another_process(tmp_path, monkeypatch):
    path = written(tmp_path, "jsonl")
    rows = path.read_text(encoding="utf-8")
    path.write_text(f"\n\u2003\n{rows}{{]", encoding="utf-8")  # blank, also beyond ASCII
    monkeypatch.chdir(tmp_path)
    table = JSONLTable("rows.jsonl")
    monkeypatch.chdir("/")
    for one in (table, pickle.loads(pickle.dumps(table))):
        assert len(one) == 24
        assert (one[0], one[22]) == (ROWS[0], ROWS[22])
        with pytest.raises(DataError, match=r"rows\.jsonl:26: expected one JSON object per line"):
            one[23]


# ---------------------------------------------------------------- what is kept beside the data


def kept_files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob(".cache/**/*.npy")}


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_lengths_are_kept_for_each_tokenizer_and_change_no_draw(
    tmp_path, tiny_model, tokenizer, many, kind
):
    if kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        path, make = tmp_path / "saved", HFDatasetPrompts
    else:
        path, make = written(tmp_path, kind), JSONLPrompts
    options = {"max_prompt_tokens": 3, "seed": 5}
    plain = loaded(tokenizer, IterablePrompts(ROWS, **options))
    prompts = loaded(tokenizer, make(str(path), **options))
    made = kept_files(tmp_path)
    assert len(made) == 2  # the digest of all rows, and the lengths
    assert prompts.draw(40) == plain.draw(40)
    assert prompts.state_dict() == plain.state_dict()
    assert (prompts.dropped, prompts.fingerprint) == (plain.dropped, plain.fingerprint)

    again = loaded(load_tokenizer(str(tiny_model)), make(str(path), **options))
    assert kept_files(tmp_path) == made
    assert isinstance(again._lengths, np.memmap)
    assert again.first() == plain.first()

    other = load_tokenizer(str(tiny_model))
    other.add_tokens(["777"])
    found = loaded(other, make(str(path), **options))
    assert len(kept_files(tmp_path)) == 3
    assert found.first() == loaded(other, IterablePrompts(ROWS, **options)).first()
    assert len(found.first()) > len(plain.first())


def test_what_is_kept_is_of_the_rows_as_they_are(tmp_path, tokenizer, many):
    path = written(tmp_path, "jsonl")
    before = loaded(tokenizer, JSONLPrompts(str(path))).fingerprint
    shaped = loaded(tokenizer, JSONLPrompts(str(path), template="{{ answer }}")).fingerprint
    path.write_text(path.read_text().replace('"22"', '"23"'))
    os.utime(path, ns=(1, 1))
    after = loaded(tokenizer, JSONLPrompts(str(path))).fingerprint
    assert len({before, shaped, after}) == 3
    count = len(kept_files(tmp_path))
    loaded(tokenizer, JSONLPrompts(str(path), map=dict, max_prompt_tokens=9))
    assert len(kept_files(tmp_path)) == count  # code may have changed since


TELLS = "{{ bos_token }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"


def test_lengths_that_are_kept_are_of_the_tools_template_and_special_tokens(tmp_path, many):
    path = tmp_path / "rows.jsonl"
    prompts = partial(JSONLPrompts, str(path), max_prompt_tokens=99)

    def longest(template=TELLS, bos="<|im_end|>"):
        tokenizer = byte_tokenizer("<|im_end|>", eos="<|im_end|>", template=template + CHATML)
        tokenizer.bos_token = bos
        kept = loaded(tokenizer, prompts()).longest()
        assert kept == loaded(tokenizer, prompts(map=dict)).longest()  # which is measured anew
        return kept

    def offering(tool):
        row = {"prompt": [{"role": "user", "content": "7"}], "tools": [{"name": tool}]}
        path.write_text(f"{json.dumps(row)}\n" * 12)

    offering("a")
    plain = longest()
    assert longest(template=f"{TELLS}..") == plain + 2
    assert longest(bos="..") == plain + 1  # two characters in place of a token
    offering("add")
    assert longest() == plain + 2


def test_few_rows_leave_nothing_beside_the_data(tmp_path, tokenizer):
    loaded(tokenizer, JSONLPrompts(str(written(tmp_path, "jsonl")), max_prompt_tokens=3))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_that_cannot_be_written_is_measured_each_time(tmp_path, tokenizer, many):
    path = written(tmp_path, "jsonl")
    (tmp_path / ".cache").write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be written .* make it writable"):
        prompts = loaded(tokenizer, JSONLPrompts(str(path), max_prompt_tokens=3))
    assert len(prompts.first()) == len([row for row in ROWS if len(row["prompt"]) <= 3])


# ---------------------------------------------------------------- a stream of files


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stream_goes_on_where_a_state_was_taken(tmp_path, tokenizer, kind):
    path = str(written(tmp_path, kind))
    options = {"buffer_size": 4, "max_prompt_tokens": 4, "seed": 2, "filter": _not_the_fifths}

    def stream():
        return loaded(tokenizer, HFStreamingPrompts(path, **options))

    whole = stream().draw(60)
    for count in (0, 4, 9, 31):
        begun = stream()
        drawn = begun.draw(count)
        rest = stream()
        rest.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert drawn + rest.draw(60 - count) == whole
        assert begun.dropped <= rest.dropped
    ids = [str(n) for n, row in enumerate(ROWS) if len(row["prompt"]) <= 4 and n % 5 != 2]
    assert {prompt.id for prompt in whole} == set(ids)
    assert [prompt.id for prompt in stream().first(3)] == ids[:3]


def _not_the_fifths(row):
    return int(row["answer"]) % 5 != 2


def test_a_stream_without_rows_is_refused(tmp_path, tokenizer):
    path = str(written(tmp_path, "jsonl"))
    prompts = HFStreamingPrompts(path, filter=lambda row: False)
    prompts.load(tokenizer)
    with pytest.raises(DataError, match="holds no rows, or filter keeps none; check"):
        prompts.draw(1)


@pytest.mark.parametrize(
    ("encoding", "kind"), [("utf-8-sig", "UTF-8"), ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16")]
)
def test_a_byte_order_mark_is_told_as_one(tmp_path, tokenizer, encoding, kind):
    path = tmp_path / "rows.jsonl"
    mark = "" if encoding == "utf-8-sig" else "\ufeff"
    path.write_bytes((mark + '{"prompt": "1="}\n').encode(encoding))
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .* byte order mark \(BOM\) of {kind}"):
        JSONLPrompts(str(path)).load(tokenizer)


def test_a_byte_order_mark_of_a_csv_is_read_over(tmp_path, tokenizer):
    path = tmp_path / "rows.csv"
    path.write_bytes("prompt,answer\n1=,1\n".encode("utf-8-sig"))
    prompts = prompts_of(str(path))
    prompts.load(tokenizer)
    assert prompts[0].columns == {"answer": 1}
