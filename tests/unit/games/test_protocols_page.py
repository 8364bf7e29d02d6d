"""The protocol of docs/protocols.md: the same class plays with words, and in an environment."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lightning_rl.games import Conversation, Seat, TextScenario, drawn
from lightning_rl.games.protocols.base import ACCEPT, REJECT

PAGE = (Path(__file__).parents[3] / "docs" / "protocols.md").read_text("utf-8")
FILES = dict(re.findall(r'```python title="(\w+)\.py"\n(.*?)```', PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Yield the page's files, as modules."""
    place = tmp_path_factory.mktemp("mine")
    for name, code in FILES.items():
        (place / f"{name}.py").write_text(code)
    sys.path.insert(0, str(place))
    yield {name: import_module(name) for name in FILES}
    sys.path.remove(str(place))
    for name in FILES:
        del sys.modules[name]


def test_it_is_as_long_as_the_page_says():
    assert FILES["my_protocol"].count("\n") <= 40


def speakers(protocol, seed):
    names = protocol.agent_names
    return [[n for n in names if protocol.speaks(n, round, seed)] for round in range(3)]


def test_words_by_hand(mine):
    protocol = mine["my_protocol"].Testimony(discount=0.25)
    prompts = {name: {"user": f"{name}, {{stance}}?"} for name in ("alice", "bob")}
    words = TextScenario(prompts | {"verifier": {"user": "Well?"}})
    orders = set()
    for seed in range(8):
        first, second = ("bob", "alice") if drawn(seed, 2) else ("alice", "bob")
        orders.add(first)
        assert speakers(protocol, seed) == [[first], [second], ["verifier"]]
        begun = Conversation.begin(protocol, words, {"label": 1}, seed)
        stance = {"alice": "reject", "bob": "accept"}
        asked = begun.asks()
        assert asked == {first: [{"role": "user", "content": f"{first}, {stance[first]}?"}]}
        told = begun.after({first: "a"}).after({second: "b"})
        assert told.asks()["verifier"][0]["content"] == f"Well?\n{first}: a\n{second}: b"
        for decision, paid in (("accept", "bob"), ("reject", "alice")):
            rewards = {"alice": 0.0, "bob": 0.0, paid: 1.0 if paid == first else 0.25}
            rewards["verifier"] = 1.0 if decision == "accept" else -1.0
            assert told.after({"verifier": decision}).rewards == rewards
    assert orders == {"alice", "bob"}


def test_an_environment_pays_each_place_what_it_would_alone(mine):
    pytest.importorskip("torchrl")
    from torchrl.envs.utils import check_env_specs

    from recipes.graph_isomorphism.env import GraphIsomorphism

    protocol = mine["my_protocol"].Testimony()
    env = GraphIsomorphism(protocol, num_envs=16, twins=20)
    check_env_specs(env)
    torch.manual_seed(0)  # the actions are drawn, and both decisions are to be among them
    played = env.rollout(3, break_when_any_done=False)
    assert played["next", "done"].squeeze(-1).tolist() == [[False, False, True]] * 16
    decided = set()
    for place, seed in enumerate(env.seeds.tolist()):
        active = [
            [name for name in protocol.agent_names if bool(played[name, "mask"][place, round])]
            for round in range(3)
        ]
        assert active == speakers(protocol, seed)
        for round in range(3):
            decision = int(played["verifier", "decision"][place, round])
            label = int(played["label"][place, round])
            _, paid = protocol.step({"verifier": decision}, round, label, seed)
            for name in protocol.agent_names:
                assert float(played["next", name, "reward"][place, round]) == float(paid[name])
        decided.add(decision)
    assert decided >= {REJECT, ACCEPT}
    assert len({bool(played["alice", "mask"][i, 0]) for i in range(16)}) == 2
    assert env.seeds.dtype == torch.long


def test_the_excerpts_of_the_page(mine):
    words = mine["my_scenario"].Excerpts({"verifier": {"user": "Well?"}})
    seat = Seat("verifier", {"prompt": "one\ntwo"}, 2, 1, 2, ["main"])
    assert words.heard(seat, "prover", "main", "1") == "prover shows: ['two']"
