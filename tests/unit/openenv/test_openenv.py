"""Test environments for OpenEnv: what is refused or read before and without a server."""

import re
from pathlib import Path

import pytest

from lightning_rl.cli.trust import TRUSTED, require_trusted_parts
from lightning_rl.cli.trusted_texts import kind_of
from lightning_rl.config import names
from lightning_rl.errors import ConfigError, EpisodeError
from lightning_rl.openenv import OpenEnvAgent, OpenEnvPrompts, OpenEnvServer
from tests.support.tiny_models import chatml_tokenizer

HERE = {"address": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "needs exactly one of the three"),
        (HERE | {"command": ["serve", "{port}"]}, "needs exactly one of the three"),
        ({"environment": "game:Game"}, "environment and python go together"),
        (HERE | {"python": "build/game"}, "environment and python go together"),
        ({"environment": "game", "python": "p"}, "environment='game' must be package.module:Name"),
        ({"command": ["serve"]}, r"command=\['serve'\] must have {port} where the port belongs"),
        ({"address": "localhost:80"}, "address='localhost:80' must begin with http://"),
        (HERE | {"sessions": 0}, "sessions=0 must be >= 1"),
        (HERE | {"answer_seconds": 0}, r"answer_seconds=0 must be >= 0\.001"),
    ],
)
def test_a_server_that_cannot_be_is_refused(arguments, told):
    with pytest.raises(ConfigError, match=told):
        OpenEnvServer(**arguments)


def test_a_program_that_is_not_there_is_named_with_the_commands_that_make_it(tmp_path):
    agent = OpenEnvAgent(OpenEnvServer(environment="game:Game", python=f"{tmp_path}/game"))
    told = rf"no program {tmp_path}/game/bin/python; .*`uv venv {tmp_path}/game && uv pip install"
    with pytest.raises(ConfigError, match=told):
        agent.configure(chatml_tokenizer())
    prompts = OpenEnvPrompts(OpenEnvServer(command=["no-such-program", "{port}"]))
    with pytest.raises(ConfigError, match="no program no-such-program; install it"):
        prompts.load(chatml_tokenizer())


def test_a_server_gets_its_port_and_no_keys_unless_they_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    server = OpenEnvServer(command=["serve", "--port={port}"], env={"A": "1"})
    assert server.command_line(8000) == ["serve", "--port=8000"]
    assert "JUDGE_API_KEY" not in server.variables()
    assert server.variables()["A"] == "1"
    named = OpenEnvServer(command=["serve", "{port}"], pass_env=["JUDGE_API_KEY"])
    assert named.variables()["JUDGE_API_KEY"] == "secret"
    game = OpenEnvServer(environment="a.b:Game", python=str(tmp_path), sessions=3)
    program, _, *rest = game.command_line(8000)
    assert (program, rest) == (f"{tmp_path}/bin/python", ["a.b:Game", "8000", "3"])


def test_a_server_is_shared_by_those_who_start_it_equally():
    first = OpenEnvServer(**HERE, observation_field="text")
    assert first.key == OpenEnvServer("http://127.0.0.1:9/", action_field="text").key
    assert first.key != OpenEnvServer(**HERE, sessions=3).key


ACTION = {"properties": {"metadata": {}, "message": {}}}
MOVE = {"properties": {"metadata": {}, "piece": {}, "square": {}}}


def test_a_turn_is_the_only_field_of_an_action_or_the_one_that_is_named():
    assert OpenEnvServer(**HERE).field_of_action(ACTION) == "message"
    assert OpenEnvServer(**HERE, action_field="square").field_of_action(MOVE) == "square"
    for named, schema, has in ((None, MOVE, "piece, square"), ("move", MOVE, "piece, square"),
                               (None, {}, "no fields")):  # fmt: skip
        told = f"action_field={named!r} must name .*; its actions have {has}"
        with pytest.raises(ConfigError, match=told):
            OpenEnvServer(**HERE, action_field=named).field_of_action(schema)


CHAT = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}]


@pytest.mark.parametrize(
    ("field", "fields", "seen"),
    [
        (None, {"board": "x.o", "moves": [1]}, "x.o"),
        (None, {"board": "x.o", "turn": "x"}, '{"board": "x.o", "turn": "x"}'),
        ("turn", {"board": "x.o", "turn": "é"}, "é"),
        ("moves", {"board": "x.o", "moves": [1, 2]}, "[1, 2]"),
        ("moves", {"moves": []}, "[]"),
        ("chat", {"chat": CHAT}, CHAT),
    ],
)
def test_the_model_reads_a_text_or_messages_or_json(field, fields, seen):
    assert OpenEnvServer(**HERE, observation_field=field).shown(fields) == seen


def test_fields_that_an_observation_lacks_are_named():
    server = OpenEnvServer(**HERE, observation_field="text", reward_fields=["hit", "cost"])
    with pytest.raises(EpisodeError, match="no field 'text'; it has hit, cost"):
        server.shown({"hit": 1, "cost": 2})
    assert server.reward_parts({"hit": True, "cost": None}) == {"hit": 1.0, "cost": 0.0}
    with pytest.raises(EpisodeError, match="no field 'cost'; it has hit"):
        server.reward_parts({"hit": 1})
    with pytest.raises(EpisodeError, match="reward_fields: cost='much' is no number"):
        server.reward_parts({"hit": 1, "cost": "much"})


def test_numbers_of_tasks_and_turns_are_refused():
    with pytest.raises(ConfigError, match="seeds=0 must be >= 1"):
        OpenEnvPrompts(OpenEnvServer(**HERE), seeds=0)
    with pytest.raises(ConfigError, match="first_seed=-1 must be >= 0"):
        OpenEnvPrompts(OpenEnvServer(**HERE), first_seed=-1)
    with pytest.raises(ConfigError, match="max_turns=0 must be >= 1"):
        OpenEnvAgent(OpenEnvServer(**HERE), max_turns=0)
    with pytest.raises(ConfigError, match=r"max_seconds=0.* must be > 0"):
        OpenEnvAgent(OpenEnvServer(**HERE), max_seconds=0)


def test_a_strangers_configuration_starts_and_reaches_no_server():
    texts = ("address", "command", "environment", "python", "env", "pass_env")
    assert [kind_of(OpenEnvServer, name) for name in texts] == [None] * len(texts)
    for kind in (OpenEnvAgent, OpenEnvPrompts):
        path = f"lightning_rl.openenv.{kind.__name__}"
        server = {"class_path": "lightning_rl.openenv.OpenEnvServer", "init_args": HERE}
        config = {"class_path": path, "init_args": {"server": server}}
        with pytest.raises(ConfigError, match=r"is a text, .* OpenEnvServer\.address"):
            require_trusted_parts(config, TRUSTED)
        require_trusted_parts(config, [*TRUSTED, "lightning_rl.openenv"])


def test_all_are_found_by_their_names_and_check_their_arguments():
    for kind in (OpenEnvAgent, OpenEnvPrompts, OpenEnvServer):
        assert names.public(kind.__name__) is kind
        assert hasattr(kind.__init__, "__wrapped__")
    with pytest.raises(ConfigError, match=r"OpenEnvAgent\.server: is missing"):
        OpenEnvAgent()
    assert OpenEnvAgent({"init_args": HERE}).server.address == HERE["address"]


def test_the_page_makes_an_environment_as_the_tests_do():
    root = Path(__file__).parents[3]
    page = (root / "docs" / "openenv" / "index.md").read_text(encoding="utf-8")
    made = re.search(r"^uv pip install .* --python \S+ (.*) my-env$", page, re.MULTILINE)
    assert made[1] == "'openenv==0.10.*'"
    locked = (root / "install" / "openenv.txt").read_text(encoding="utf-8")
    assert re.search(r"^openenv==0\.10\.", locked, re.MULTILINE)
