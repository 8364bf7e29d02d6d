"""Test the recipe graph_isomorphism: pairs, what is seen of them, rewards, and what can be won."""

import networkx as nx
import numpy as np
import pytest
import torch
from torchrl.envs import check_env_specs

from lightning_rl.errors import ConfigError
from lightning_rl.games.protocols.base import ACCEPT, GO_ON, REJECT
from lightning_rl.games.protocols.single_prover import Adp, Nip, SoloVerifier
from lightning_rl.games.protocols.two_provers import Debate
from lightning_rl.games.protocols.zero_knowledge import ZeroKnowledge
from recipes.graph_isomorphism.data import certificate, isomorphic, switched, twins
from recipes.graph_isomorphism.env import GraphIsomorphism
from recipes.graph_isomorphism.game import fooled
from recipes.graph_isomorphism.views import claims, node_features, pointed_at, said, union
from tests.support.tolerances import rounding

TRIANGLES = np.kron(np.eye(2, dtype=np.uint8), 1 - np.eye(3, dtype=np.uint8)).astype(np.uint8)
HEXAGON = np.roll(np.eye(6, dtype=np.uint8), 1, 0) | np.roll(np.eye(6, dtype=np.uint8), -1, 0)


def small(protocol=None, **options) -> GraphIsomorphism:
    return GraphIsomorphism(protocol, **({"num_envs": 16, "twins": 10} | options))


def same_graph(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell by networkx whether graphs, which isolated nodes may pad, are isomorphic."""
    return nx.is_isomorphic(nx.from_numpy_array(first), nx.from_numpy_array(second))


# ---------------------------------------------------------------- data


def test_isomorphism_is_told_exactly():
    # Six nodes of degree 2 each, the same to Weisfeiler and Leman.
    assert not isomorphic(TRIANGLES, HEXAGON)
    assert not isomorphic(HEXAGON, HEXAGON[:5, :5])
    rng = np.random.default_rng(0)
    verdicts = set()
    for _ in range(200):
        size = int(rng.integers(4, 9))
        first = np.triu(rng.random((size, size)) < 0.4, 1).astype(np.uint8)
        first |= first.T
        second = switched(first, rng)
        verdicts.add(same := isomorphic(first, second))
        assert same == same_graph(first, second)
        order = rng.permutation(size)
        assert isomorphic(first, first[np.ix_(order, order)])
        assert certificate(first) == certificate(first[np.ix_(order, order)])
    assert verdicts == {True, False}


@pytest.mark.parametrize(("kind", "nodes"), [("random", (8, 12)), ("regular", (12, 13))])
def test_twins_differ_and_look_alike(kind, nodes):
    found = twins("train", 12, nodes, kind)
    assert found.graphs.shape == (12, 2, nodes[1], nodes[1])
    for size, pair in zip(found.sizes, found.graphs, strict=True):
        assert nodes[0] <= size <= nodes[1]
        assert not pair[:, size:].any()
        assert (pair == pair.transpose(0, 2, 1)).all()
        first, second = pair[:, :size, :size]
        assert not same_graph(first, second)
        assert sorted(first.sum(0)) == sorted(second.sum(0))
        if kind == "regular":  # what refinement of colours begins with is all that it finds
            assert (first.sum(0) == 4).all()


def test_no_graph_is_in_both_splits_or_there_twice():
    of = {split: twins(split, 40, (8, 9)) for split in ("train", "test")}
    marks = {
        split: [
            certificate(graph[:size, :size])
            for pair, size in zip(found.graphs, found.sizes, strict=True)
            for graph in pair
        ]
        for split, found in of.items()
    }
    assert len(set(marks["train"])) == len(set(marks["test"])) == 80
    assert not set(marks["train"]) & set(marks["test"])
    other = twins("test", 40, (8, 9), seed=1)
    assert (other.graphs != of["test"].graphs).any()


def test_data_that_there_are_not():
    with pytest.raises(ConfigError, match=r"nodes=\[4, 12\]: expected 6 <= fewest"):
        twins("train", 1, (4, 12))
    with pytest.raises(ConfigError, match="split='eval' must be one of train, test"):
        twins("eval", 1, (8, 8))
    with pytest.raises(ConfigError, match=r"count=50: there are hardly more than .* raise nodes"):
        twins("train", 50, (6, 6), "regular")


# ---------------------------------------------------------------- what is seen


def test_facts_of_claims_by_hand():
    # A path 0-1-2 beside a triangle 0-1-2.
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    graphs = torch.stack([path, 1 - torch.eye(3, dtype=torch.long)]).float().unsqueeze(0)
    # 0 of the path is said to be 0 of the triangle (3), 2 of the triangle (5) to be 2 of the path;
    # the last answer is in the graph that was asked about, and claims nothing.
    questions, answers = torch.tensor([[0, 5, 1]]), torch.tensor([[3, 2, 0]])
    made, facts = claims(questions, answers, graphs)
    assert made.tolist() == [[1, 1, 0]]
    # Both ends of the path have one neighbour; in the triangle every node has two.
    assert facts[0, 0, 0].tolist() == [1, 0, 1, 0, 0, 1]
    # The ends are no neighbours and share one; in the triangle they are neighbours and share one.
    assert facts[0, 0, 1].tolist() == facts[0, 1, 0].tolist() == [0, 0, 1, 0, 1, 0]
    assert not facts[0, 2].any()
    assert not facts[0, :, 2].any()
    told = said(torch.tensor([[1, 4, -1]]), graphs)
    assert told.tolist() == [[[-1, 2], [1, 2], [0, 0]]]


def test_true_counterparts_give_facts_without_a_difference():
    env = small(num_envs=40)
    env.reset()
    graphs = env._all[:, 0]
    order = torch.stack([torch.randperm(12) for _ in graphs])
    rows = torch.arange(len(graphs)).unsqueeze(1)
    shuffled = graphs[rows.unsqueeze(2), order.unsqueeze(2), order.unsqueeze(1)]
    places = torch.tensor([[0, 3, 7]]).expand(len(graphs), 3)
    asked, answered = order.gather(1, places), places + 12
    made, facts = claims(asked, answered, torch.stack([graphs, shuffled], 1))
    assert bool(made.all())
    assert not facts[..., 3:].any()
    assert bool(facts[..., :3].any())


def test_views_of_the_prover():
    graphs = torch.from_numpy(np.stack([HEXAGON, TRIANGLES])).float().unsqueeze(0)
    features = node_features(graphs)
    # Degree 2 of 6. Two steps along a hexagon come back in 2 of 4 ways, three never; around a
    # triangle three steps do in 2 of 8.
    assert features[0, 0, 0, :3].tolist() == pytest.approx([1 / 3, 0.5, 0])
    assert features[0, 1, 0, :3].tolist() == pytest.approx([1 / 3, 0.5, 0.25])
    both = union(graphs)[0]
    assert torch.equal(both[:6, :6], graphs[0, 0])
    assert torch.equal(both[6:, 6:], graphs[0, 1])
    assert not both[:6, 6:].any()
    marks = pointed_at(torch.tensor([[8, 0, -1]]), 6)
    assert marks.nonzero().tolist() == [[0, 0, 1], [0, 8, 0]]


# ---------------------------------------------------------------- the environment


@pytest.mark.parametrize("protocol", [Nip(), Nip(7, 7, verifier_first=True), Adp(), SoloVerifier()])
def test_specs(protocol):
    env = small(protocol, num_envs=3)
    check_env_specs(env)
    assert env.group_map == {name: [name] for name in protocol.agent_names}


def test_the_same_seed_deals_the_same_pairs():
    def dealt(seed):
        env = small()
        env.set_seed(seed)
        data = env.reset()
        return torch.cat([data["pair"], env.graphs.flatten(1).long()], 1)

    assert torch.equal(dealt(3), dealt(3))
    assert not torch.equal(dealt(3), dealt(4))


def test_labels_are_true_and_balanced():
    env = small(num_envs=40)
    env.pairs = torch.arange(40)
    env.reset()
    assert env.label.float().mean() == 0.5
    for graphs, label in zip(env.graphs.numpy(), env.label.tolist(), strict=True):
        assert same_graph(*graphs) == bool(label)
    # Each graph comes first, and second, as often in either kind of pair.
    firsts = env.pair // 2 % 2
    assert torch.equal(firsts[env.label == 1], firsts[env.label == 0])


def test_only_what_is_over_is_dealt_anew():
    env = small()
    data = env.reset()
    before, pairs = env.graphs.clone(), env.pair.clone()
    over = torch.zeros(16, 1, dtype=torch.bool)
    over[5] = True
    env.round += 3
    env.reset(data.set("_reset", over))
    assert env.round.tolist() == [0 if place == 5 else 3 for place in range(16)]
    kept = torch.arange(16) != 5
    assert torch.equal(env.graphs[kept], before[kept])
    assert torch.equal(env.pair[kept], pairs[kept])


def acted(env: GraphIsomorphism, data, prover: int, verifier: int, decision: int):
    """Take one step of all environments."""
    ones = torch.ones(env.num_envs, 1, dtype=torch.long)
    data["prover", "message"], data["verifier", "message"] = prover * ones, verifier * ones
    data["verifier", "decision"] = decision * ones
    return env.step(data)["next"]


def test_an_interaction_by_hand():
    env = small(Nip(4, 3, verifier_first=True), nodes=(8, 8))
    data = env.reset()
    assert bool(data["verifier", "mask"].all())
    assert not data["prover", "mask"].any()
    assert not data["prover", "last"].any()
    data = acted(env, data, prover=1, verifier=3, decision=ACCEPT)  # too early to count
    assert not data["done"].any()
    assert bool(data["prover", "mask"].all())
    assert data["prover", "last"][0, 0].nonzero().tolist() == [[3]]
    # The question is about the first graph, the answer in the second.
    assert data["prover", "choices"][0, 0].tolist() == [0.0] * 8 + [1.0] * 8
    data = acted(env, data, prover=2, verifier=0, decision=GO_ON)
    assert env.messages["main"][0].tolist() == [3, 10, -1, -1]
    assert data["verifier", "claimed"][0].tolist() == [[1, 0]]
    assert data["verifier", "round"][0, 0].tolist() == [0, 0, 1, 0]
    assert not data["verifier", "reward"].any()
    data = acted(env, data, prover=0, verifier=0, decision=REJECT)
    assert bool(data["terminated"].all())
    right = torch.where(env.label == 0, 1.0, -1.0)
    assert torch.equal(data["verifier", "reward"].flatten(), right)
    assert not data["prover", "reward"].any()


def test_a_verifier_that_never_decides():
    env = small(Adp())
    data = env.reset()
    for done in (False, True):
        data = acted(env, data, prover=0, verifier=0, decision=GO_ON)
        assert bool(data["done"].all()) == done
    assert bool((data["verifier", "reward"] == -1).all())


def test_a_node_that_is_not_there_counts_on_from_the_first():
    env = small(nodes=(8, 12), num_envs=64)
    data = acted(env, env.reset(), prover=11, verifier=0, decision=GO_ON)
    del data
    assert torch.equal(env.messages["main"][:, 0], 11 % env.size)


def test_the_verifier_alone_sees_nothing_of_the_graphs():
    data = small(SoloVerifier()).reset()
    for name, seen in data["verifier"].items():
        assert bool((seen == seen[0]).all()), name


# ---------------------------------------------------------------- zero knowledge


def beside(protocol, wrapped, logits=None):
    """Play an environment and its copy with an adversary alike; yield each step."""
    alone, both = small(protocol, nodes=(8, 8)), small(wrapped, nodes=(8, 8))
    first, second = alone.reset(), both.reset()
    torch.manual_seed(0)
    for _ in range(protocol.max_message_rounds):
        both.rand_action(second)
        for name in protocol.agent_names:
            for action in ("message", "decision") if name == "verifier" else ("message",):
                first[name, action] = second[name, action].clone()
        for name, (message, decision) in (logits or {}).items():
            second[name, "message_logits"] = message.expand(16, 1, 16)
            second[name, "decision_logits"] = decision.expand(16, 1, 3)
        first, second = alone.step(first)["next"], both.step(second)["next"]
        yield first, second
        first, second = (data.exclude("reward") for data in (first, second))


def test_an_adversary_changes_nothing_for_the_others_but_what_provers_are_paid():
    inner = Nip(4, 4, verifier_first=False, turn_reward=0.05)
    # The cosines of messages and decisions: 24/25 and -1.
    message, guess = torch.zeros(2, 16)
    message[:2], guess[:2] = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    decision = torch.tensor([0.0, 2.0, 0.0])
    logits = {"adversarial_verifier": (message, decision), "simulator": (guess, -decision / 4)}
    wrapped = ZeroKnowledge(inner, simulator_coefficient=2.0, prover_coefficient=0.1)
    for round, (first, second) in enumerate(beside(inner, wrapped, logits)):
        for name in ("verifier", "prover"):
            for key in ("said", "claimed", "facts", "last", "choices", "round", "mask"):
                if key in first[name]:
                    assert torch.equal(first[name, key], second[name, key]), key
        assert torch.equal(first["done"], second["done"])
        assert torch.equal(first["verifier", "reward"], second["verifier", "reward"])
        paid = 2.0 * (24 / 25 - 1) if round % 2 else 0.0  # where the adversary speaks
        more = second["prover", "reward"] - first["prover", "reward"]
        torch.testing.assert_close(more, torch.full_like(more, 0.1 * paid))
        for name, sign in (("simulator", 1), ("adversarial_verifier", -1)):
            rewards, bound = second[name, "reward"].flatten(), rounding(16, magnitude=2.0)
            assert rewards.tolist() == pytest.approx([sign * paid] * 16, abs=bound)
    assert bool(second["done"].all())


def test_a_simulator_sees_what_its_adversary_does_but_no_answer():
    env = small(ZeroKnowledge(Nip(5, 5, verifier_first=True)), nodes=(8, 8))
    check_env_specs(env)
    assert list(env.action_spec["prover"].keys()) == ["message", "adversarial_main_message"]
    data = env.reset()
    torch.manual_seed(0)
    for _ in range(4):
        data = env.step(env.rand_action(data).update(env.full_state_spec.zero()))["next"]
    adversary, simulator = data["adversarial_verifier"], data["simulator"]
    assert torch.equal(adversary["mask"], simulator["mask"])
    assert torch.equal(adversary["said"][:, :, ::2], simulator["said"][:, :, ::2])
    assert bool(adversary["said"][:, :, 1:4:2].any(-1).all())
    assert not simulator["said"][:, :, 1::2].any()
    assert bool(adversary["claimed"].all())
    assert not simulator["claimed"].any()
    assert not simulator["facts"].any()
    # The verifier's talk is another: neither hears of it, and the prover sees both.
    assert not torch.equal(env.messages["main"], env.messages["adversarial_main"])
    marks = data["prover", "marks"][:, 0]
    expected = [pointed_at(env.messages[c], 8) for c in ("main", "adversarial_main")]
    assert torch.equal(marks, torch.cat(expected, -1))


def test_it_goes_on_until_verifier_and_adversary_have_decided():
    env = small(ZeroKnowledge(Nip(6)))
    data, half = env.reset(), torch.arange(env.num_envs) % 2 == 0
    both = ("verifier", "adversarial_verifier")
    masks = {name: [] for name in (*both, "simulator")}
    done = []
    for round in range(4):
        for name, told in masks.items():
            told.append(data[name, "mask"].flatten())
        data = env.rand_action(data).update(env.full_state_spec.zero())
        # In half of the places one of them decides in its first turn, in the others the other.
        for name, early in zip(both, (half, ~half), strict=True):
            said = torch.where(early == (round == 1), ACCEPT, GO_ON)
            data[name, "decision"] = said.reshape(-1, 1, 1)
        data = env.step(data)["next"]
        done.append(data["done"].flatten())
        data = data.exclude("reward")
    assert [bool(told.any()) for told in done] == [False, False, False, True]
    assert bool(done[3].all())
    assert bool(masks["verifier"][1].all())
    assert torch.equal(masks["verifier"][3], ~half)
    assert torch.equal(masks["adversarial_verifier"][3], half)
    assert torch.equal(masks["simulator"][3], half)  # it guesses what there is to guess
    env.reset()
    assert all(bool((decided == GO_ON).all()) for decided in env.decided.values())


# ---------------------------------------------------------------- what can be won


def test_what_the_best_prover_can_do():
    # One question says nothing: all nodes are alike.
    assert fooled(TRIANGLES, HEXAGON, 1) == 1
    # Two: the prover has an answer to the second for the node itself (1 of 6), and a stranger for
    # one with another. A triangle's neighbours share a node, a hexagon's do not: neither of 2
    # neighbours of the first has a counterpart. Three others share 0 in the triangles; on the
    # hexagon 2 of 3 share one, and have none. Half of the questions are about each graph.
    assert fooled(TRIANGLES, HEXAGON, 2) == pytest.approx((4 / 6 + 2 / 6) / 2)
    assert fooled(TRIANGLES, HEXAGON, 2, repeats=False) == pytest.approx((3 / 5 + 1 / 5) / 2)
    assert fooled(HEXAGON, HEXAGON, 3) == 1


@pytest.mark.parametrize("protocol", [Debate(), Nip(random_stances=True), ZeroKnowledge(Debate())])
def test_protocols_that_it_cannot_show_are_refused(protocol):
    with pytest.raises(ConfigError, match="take a protocol with one channel and fixed stances"):
        GraphIsomorphism(protocol, num_envs=2, twins=4)
