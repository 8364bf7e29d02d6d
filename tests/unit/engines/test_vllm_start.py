"""The folder that vLLM starts from has the same path in every run."""

import pytest

from lightning_rl.engines.vllm.start import lasting


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lightning_rl" / "engines"


@pytest.fixture
def skeleton(tmp_path):
    def make(name, config="{}"):
        (tmp_path / name / "critic").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "critic" / "config.json").write_text("{}")
        return tmp_path / name

    return make


def test_equal_files_have_one_path_and_others_another(cache, skeleton):
    one = lasting(skeleton("first"))
    assert one.parent == cache
    assert (one / "config.json").read_text() == (one / "critic" / "config.json").read_text() == "{}"
    assert lasting(skeleton("second")) == one
    other = lasting(skeleton("third", '{"a": 1}'))
    assert other.parent == cache
    assert {one, other} == set(cache.iterdir())  # nothing beside them


def test_what_was_damaged_is_made_anew(cache, skeleton):
    first = skeleton("first")
    kept = lasting(first)
    (kept / "config.json").write_text("{")
    assert lasting(first) == kept
    assert (kept / "config.json").read_text() == "{}"


def test_weights_are_not_copied_and_a_cache_is_not_needed(cache, skeleton, caplog):
    own = skeleton("own")
    (own / "model.safetensors").touch()
    assert lasting(own) == own
    assert not cache.exists()
    cache.parents[1].touch()  # a file is where the folder would be
    bare = skeleton("bare")
    assert lasting(bare) == bare
    (told,) = caplog.messages
    assert told.startswith("later runs cannot reuse vLLM's compiled code: ")
