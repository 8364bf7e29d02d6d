"""Test what lies beside an exported model, and that folders are whole or as they were."""

import json
import os

import pytest
import yaml

from lightning_rl.callbacks import latest_hf_checkpoint
from lightning_rl.callbacks.model_card import without_secrets
from lightning_rl.run.files.folders import replace_folder


def test_secrets_stay_out_of_the_card():
    given = {
        "data": {"api_key": "sk-1", "max_tokens": 7, "tokenizer": "there", "tokens": ["a"]},
        "url": "https://me:word@host/v1",
        "hf_token": "hf_2",
    }
    told = without_secrets(yaml.safe_dump(given))
    assert not any(secret in told for secret in ("sk-1", "hf_2", "word"))
    assert yaml.safe_load(told)["data"] | {"api_key": ""} == given["data"] | {
        "api_key": "",
        "tokens": ["***"],
    }


def test_the_newest_is_found_by_its_iteration(tmp_path):
    assert latest_hf_checkpoint(tmp_path) is None
    for name, iteration in (
        ("hf", 4),
        ("hf_exports/iteration_5", 5),
        ("hf_exports/iteration_3", 3),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "export.json").write_text(json.dumps({"iteration": iteration}))
    (tmp_path / "hf_exports/iteration_9").mkdir()  # of which not all was written
    newest = tmp_path / "hf_exports/iteration_5"
    assert latest_hf_checkpoint(tmp_path) == newest
    assert latest_hf_checkpoint(tmp_path / "hf") == newest


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    target = tmp_path / "hf"
    with replace_folder(target) as place:
        (place / "export.json").write_text('{"iteration": 1}')
    with pytest.raises(TypeError), replace_folder(target) as place:
        (place / "export.json").write_text(None)
    assert latest_hf_checkpoint(tmp_path) == target
    # A process that is killed between the two renames leaves this.
    rename = os.rename
    calls = []

    def killed(self, other):
        calls.append(other)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(self, other)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", killed)
        with pytest.raises(KeyboardInterrupt), replace_folder(target) as place:
            (place / "export.json").write_text('{"iteration": 2}')
    found = latest_hf_checkpoint(tmp_path)
    assert found is not None
    assert json.loads((found / "export.json").read_text()) == {"iteration": 1}
    with replace_folder(target) as place:
        (place / "export.json").write_text('{"iteration": 3}')
    assert json.loads((target / "export.json").read_text()) == {"iteration": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_link_is_replaced_and_what_it_pointed_to_stays(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "hf").symlink_to("own")
    for iteration in (1, 2):
        with replace_folder(tmp_path / "hf") as place:
            (place / "export.json").write_text(json.dumps({"iteration": iteration}))
    assert not (tmp_path / "hf").is_symlink()
    assert json.loads((tmp_path / "hf/export.json").read_text()) == {"iteration": 2}
    assert list((tmp_path / "own").iterdir()) == []
