"""Test environments for verifiers: what is refused or told before one is hosted."""

import re
import sys
from pathlib import Path

import pytest

from lightning_rl.cli.trust import TRUSTED, require_trusted_parts
from lightning_rl.cli.trusted_texts import kind_of
from lightning_rl.config import names
from lightning_rl.errors import ConfigError
from lightning_rl.verifiers import VerifiersAgent, VerifiersPrompts
from lightning_rl.verifiers.hosting import Hosting
from lightning_rl.verifiers.prompts import shown
from tests.support.tiny_models import chatml_tokenizer


def test_an_interpreter_that_is_not_there_is_named_with_the_commands_that_make_one(tmp_path):
    agent = VerifiersAgent("wordle", f"{tmp_path}/games")
    told = rf"no interpreter at {tmp_path}/games/bin/python; .*`uv venv {tmp_path}/games && "
    with pytest.raises(ConfigError, match=told):
        agent.configure(chatml_tokenizer())
    (tmp_path / "games").mkdir()
    with pytest.raises(ConfigError, match=told):
        agent.configure(chatml_tokenizer())


def test_an_interpreter_without_verifiers_is_told_what_to_install():
    prompts = VerifiersPrompts("wordle", sys.executable)
    with pytest.raises(ConfigError, match=r"verifiers is not installed there; .*'verifiers>=0\.4'"):
        prompts.load(chatml_tokenizer())


def test_an_environments_directory_means_its_python(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    # The link itself: by it Python knows which environment it is.
    assert Hosting("wordle", str(tmp_path)).program == f"{tmp_path}/bin/python"
    assert Hosting("wordle", f"{tmp_path}/bin/python").program == f"{tmp_path}/bin/python"


def test_a_worker_gets_no_keys_unless_they_are_named(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    kept = Hosting("wordle", sys.executable).variables()
    assert "PATH" in kept
    assert not kept.keys() & {"JUDGE_API_KEY", "PYTHONPATH", "VIRTUAL_ENV"}
    named = Hosting("wordle", sys.executable, env={"A": "1"}, pass_env=("JUDGE_API_KEY",))
    assert named.variables() == kept | {"JUDGE_API_KEY": "secret", "A": "1"}
    monkeypatch.delenv("JUDGE_API_KEY")
    with pytest.raises(ConfigError, match="pass_env names 'JUDGE_API_KEY', which is not set"):
        named.check()


def test_the_taskset_is_named_once():
    with pytest.raises(ConfigError, match=r"options\.taskset\.id is set by `environment`"):
        VerifiersAgent("wordle", sys.executable, {"taskset": {"id": "other"}})
    hosting = Hosting("wordle", sys.executable, {"taskset": {"num": 3}, "agent": {"max_turns": 2}})
    assert hosting.configuration() == {
        "taskset": {"id": "wordle", "num": 3},
        "agent": {"max_turns": 2},
    }


@pytest.mark.parametrize(
    ("task", "prompt"),
    [
        ({"prompt": "Hi"}, [{"role": "user", "content": "Hi"}]),
        (
            {"prompt": "Hi", "system_prompt": "Be kind."},
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        ),
        (
            {"prompt": [{"role": "user", "content": "Hi", "name": None}]},
            [{"role": "user", "content": "Hi"}],
        ),
        ({"name": "a hand of poker", "idx": 3}, "a hand of poker"),
        ({"idx": 3}, "task 3"),
    ],
)
def test_the_prompt_is_what_the_model_reads_first_as_far_as_the_task_says(task, prompt):
    assert shown(task) == prompt


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="limit=0 must be >= 1"):
        VerifiersPrompts("wordle", sys.executable, limit=0)
    with pytest.raises(ConfigError, match="workers=0 must be >= 1"):
        VerifiersAgent("wordle", sys.executable, workers=0)
    with pytest.raises(ConfigError, match="environment is empty"):
        VerifiersAgent("", sys.executable)


def test_a_strangers_configuration_starts_no_interpreter():
    texts = ("environment", "python", "options", "env", "pass_env")
    for kind in (VerifiersAgent, VerifiersPrompts):
        assert [kind_of(kind, name) for name in texts] == [None] * len(texts)
        path = f"lightning_rl.verifiers.{kind.__name__}"
        config = {"class_path": path, "init_args": {"environment": "evil", "python": "./evil"}}
        with pytest.raises(ConfigError, match=f"'evil' is a text, .* {kind.__name__}.environment"):
            require_trusted_parts(config, TRUSTED)
        require_trusted_parts(config, [*TRUSTED, "lightning_rl.verifiers"])


def test_both_are_found_by_their_names_and_check_their_arguments():
    for kind in (VerifiersAgent, VerifiersPrompts):
        assert names.public(kind.__name__) is kind
        assert hasattr(kind.__init__, "__wrapped__")
        with pytest.raises(ConfigError, match=f"{kind.__name__}.python: is missing"):
            kind("wordle")


def test_the_page_makes_an_environment_as_the_message_says():
    page = (Path(__file__).parents[3] / "docs" / "verifiers" / "index.md").read_text(
        encoding="utf-8"
    )
    made = re.search(r"^uv venv (\S+)\n(uv pip install .*) my-wordle$", page, re.MULTILINE)
    place = Path(made[1]).absolute()
    told = f"`uv venv {place} && {made[2].replace(made[1], str(place))} PACKAGE`"
    assert Hosting("my-wordle", made[1]).recipe().startswith(told)
