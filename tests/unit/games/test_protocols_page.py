"""The protocol of docs/protocols.md: the same class plays with words, and in an environment."""

import re
from pathlib import Path

import pytest
import torch

from lightning_rl.games import Conversation, Seat, TextScenario, drawn
from lightning_rl.games.protocols.base import ACCEPT, REJECT
from tests.support.pages import as_modules

PAGE = (Path(__file__).parents[3] / "docs" / "protocols.md").read_text("utf-8")
FILES = dict(re.findall(r'```python title="(\w+)\.py"\n(.*?)```', PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Yield the page's files, as modules."""
    with as_modules(FILES, tmp_path_factory.mktemp("mine")) as modules:
        yield modules


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
