"""Test that secrets are found by their form, and nothing else is taken for one."""

import pytest

from lightning_rl.config.secrets import found_in, without_secrets

OPENAI = "sk-proj-" + "a1B2" * 6
HUB = "hf_" + "Ab3" * 11
GITHUB = "ghp_" + "x9Y8" * 9
AWS = "AKIA" + "ABCD2345" * 2


@pytest.mark.parametrize(
    ("text", "kind", "without"),
    [
        (OPENAI, "a key of an OpenAI-like service", "***"),
        (f"Bearer {HUB}, please", "a Hugging Face token", "Bearer ***, please"),
        (GITHUB, "a GitHub token", "***"),
        ("github_pat_" + "11ABC_" * 5, "a GitHub token", "***"),
        (AWS, "an AWS access key", "***"),
        ("https://me:word@host/x?y", "a login in a URL", "https://***@host/x?y"),
        ("git+ssh://token@host", "a login in a URL", "git+ssh://***@host"),
    ],
)
def test_a_secret_is_found_and_hidden_and_the_rest_of_its_text_stays(text, kind, without):
    tree = {"data": {"judges": [{"url": text}], "n": 3}}
    assert found_in(tree) == [("data.judges[0].url", kind)]
    hidden = without_secrets(tree)
    assert hidden == {"data": {"judges": [{"url": without}], "n": 3}}
    assert found_in(hidden) == []
    assert tree["data"]["judges"][0]["url"] == text  # a copy was changed


@pytest.mark.parametrize(
    "text",
    [
        "task-force-of-twenty-five-people",  # "sk-" within a word
        "sk-short",
        "hf_cache_dir",
        "AKIA",
        "a@b.org",
        "https://host/a@b",
        "http://localhost:8000/v1",
    ],
)
def test_other_texts_stay(text):
    assert found_in([text, (text,)]) == []
    assert without_secrets({"a": text}) == {"a": text}


def test_a_secret_key_of_a_mapping_is_hidden_also_in_the_places_that_are_named():
    tree = {HUB: {"inner": [1, AWS]}, 7: None}
    places = [("***", "a Hugging Face token"), ("***.inner[1]", "an AWS access key")]
    assert found_in(tree) == places
    assert without_secrets(tree) == {"***": {"inner": [1, "***"]}, 7: None}


def test_two_secrets_in_one_text_are_both_found():
    text = f"https://me:{OPENAI}@host?key={AWS}"
    kinds = {kind for _, kind in found_in(text)}
    assert kinds == {
        "a key of an OpenAI-like service",
        "an AWS access key",
        "a login in a URL",
    }
    assert without_secrets(text) == "https://***@host?key=***"
