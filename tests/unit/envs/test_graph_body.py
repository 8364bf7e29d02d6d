"""GraphBody and NodeHead: new numbers for nodes change the order of what they give, and no more."""

import pytest
import torch

from lightning_rl.envs.networks.actor_critic import ActorCritic, joint_log_prob
from lightning_rl.envs.networks.distributions import Categorical
from lightning_rl.envs.networks.graph import GraphBody, NodeHead, normalized
from lightning_rl.envs.networks.policy_heads import CategoricalHead
from lightning_rl.envs.networks.space import Binary, Discrete, Observed, Space
from lightning_rl.errors import ConfigError

NODES, HALF = 8, 4
SPACE = Space(
    {
        "adjacency": Observed((NODES, NODES)),
        "nodes": Observed((NODES, 2)),
        "exists": Observed((NODES,)),
        "marks": Observed((NODES, 3)),
        "last": Observed((NODES,)),
        "time": Observed((5,)),
    },
    {"message": Discrete(NODES), "decision": Discrete(3)},
)


def body(**options) -> GraphBody:
    given = {"hidden": 8, "heads": 2, "graphs": 2, "marks": "marks", "context": ["time"]}
    made = GraphBody(**(given | options))
    made.build(SPACE)
    # What begins next to zero is to be seen too.
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def observations(batch: int = 5) -> dict[str, torch.Tensor]:
    """Return two graphs of four nodes, of which the second's last is padding."""
    exists = torch.ones(batch, NODES)
    exists[:, -1] = 0
    edges = torch.zeros(batch, NODES, NODES)
    for begin in (0, HALF):
        part = (torch.rand(batch, HALF, HALF) < 0.6).float().triu(1)
        edges[:, begin : begin + HALF, begin : begin + HALF] = part + part.transpose(1, 2)
    return {
        "adjacency": edges * exists.unsqueeze(1) * exists.unsqueeze(2),
        "nodes": torch.rand(batch, NODES, 2),
        "exists": exists,
        "marks": (torch.rand(batch, NODES, 3) < 0.3).float(),
        "last": torch.eye(NODES)[torch.randint(NODES - 1, (batch,))],
        "time": torch.rand(batch, 5),
    }


def reordered(seen: dict[str, torch.Tensor], order: torch.Tensor) -> dict[str, torch.Tensor]:
    of_nodes = {n: value[:, order] for n, value in seen.items() if n != "time"}
    return of_nodes | {"adjacency": of_nodes["adjacency"][:, :, order], "time": seen["time"]}


ORDERS = {
    "within each graph": [2, 0, 3, 1, 6, 4, 5, 7],
    "the second graph first": [4, 5, 6, 7, 0, 1, 2, 3],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_new_numbers_change_the_order_alone(order):
    torch.manual_seed(0)
    made, seen, order = body(), observations(), torch.tensor(order)
    head = NodeHead("last", choices="exists")
    head.build(9 * 8, SPACE.actions["message"])
    there, then = made(seen), made(reordered(seen, order))
    torch.testing.assert_close(then[:, :8], there[:, :8], atol=1e-4, rtol=1e-4)
    nodes, after = (value[:, 8:].unflatten(1, (NODES, 8)) for value in (there, then))
    torch.testing.assert_close(after, nodes[:, order], atol=1e-4, rtol=1e-4)
    logits = head(there, seen).logprobs
    named = head(then, reordered(seen, order)).logprobs
    torch.testing.assert_close(named, logits[:, order], atol=1e-4, rtol=1e-4)


def test_padding_is_not_seen_and_not_named():
    torch.manual_seed(0)
    made, seen = body(), observations()
    other = {name: value.clone() for name, value in seen.items()}
    other["nodes"][:, -1] += 5
    other["marks"][:, -1] = 1
    assert torch.equal(made(other), made(seen))
    assert not made(seen)[:, -8:].any()
    head = NodeHead(choices="exists")
    head.build(9 * 8, Discrete(NODES))
    assert bool((head(made(seen), seen).log_prob(torch.full((5,), 7)) == -torch.inf).all())


def test_shapes_of_batches():
    torch.manual_seed(0)
    made, seen = body(), observations(6)
    wide = {name: value.reshape(3, 2, 1, *value.shape[1:]) for name, value in seen.items()}
    torch.testing.assert_close(made(wide).reshape(6, 72), made(seen))
    assert made({name: value[:0] for name, value in seen.items()}).shape == (0, 72)
    pooled = body(node_features=False)
    assert pooled(wide).shape == (3, 2, 1, 8)


def test_features_are_normalised_over_the_nodes_that_exist():
    features = torch.tensor([[[1.0], [3.0], [100.0]]])
    # Mean 2 and variance 1 of the first two; the third is padding.
    made = normalized(features, torch.tensor([[[1.0], [1.0], [0.0]]]))
    assert made.flatten().tolist() == pytest.approx([-1, 1, 0], abs=1e-4)


def test_graphs_that_differ_are_told_apart_in_the_whole():
    torch.manual_seed(0)
    # Where nodes are nearly alike their normalisation makes 300 times as much of rounding.
    made, seen = body(marks=None, context=[]).double(), observations(1)
    seen = {name: value.double() for name, value in seen.items()}
    seen["exists"][:] = 1
    twice = seen["adjacency"][:, :HALF, :HALF]
    for name in ("nodes", "last"):
        seen[name][:, HALF:] = seen[name][:, :HALF]
    seen["adjacency"] = torch.block_diag(twice[0], twice[0]).unsqueeze(0)
    exists = seen["exists"].unsqueeze(-1)
    whole, apart = made._pooled(made(seen)[:, 8:].unflatten(1, (NODES, 8)), exists)
    assert bool(whole.abs().sum() > 0.1)
    assert not bool((apart.abs() > 1e-4).any())
    seen["adjacency"][0, :HALF, :HALF] = 1 - torch.eye(HALF)
    seen["adjacency"][0, HALF:, HALF:] = 0
    _, apart = made._pooled(made(seen)[:, 8:].unflatten(1, (NODES, 8)), exists)
    assert bool((apart.abs() > 0.1).any())


def test_a_node_is_named_that_is_like_the_last():
    head = NodeHead("last", alike=6.0)
    head.build(4 * 2, Discrete(3))
    # The whole has two features, then the nodes; the last named is node 0, and 2 is like it.
    features = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 3.0, 0.0]])
    made = head(features, {"last": torch.tensor([[1.0, 0.0, 0.0]])})
    # Its cosines are 1, 0 and 1; the score itself begins next to zero.
    assert made.logits[0].tolist() == pytest.approx([6, 0, 6], abs=0.2)
    nobody = head(features, {"last": torch.zeros(1, 3)})
    assert nobody.logits[0].tolist() == pytest.approx([0, 0, 0], abs=0.2)


def test_an_agent_of_both():
    torch.manual_seed(0)
    agent = ActorCritic(
        GraphBody(hidden=8, heads=2, graphs=2, marks="marks"),
        {"message": NodeHead("last"), "decision": CategoricalHead()},
        critic_body=GraphBody(hidden=8, heads=2, graphs=2, node_features=False, attention=0),
    )
    agent.build(SPACE)
    seen = observations()
    made, values = agent(seen)
    assert isinstance(made["message"], Categorical)
    actions = {name: d.sample() for name, d in made.items()}
    assert values.shape == (5,)
    (joint_log_prob(made, actions).sum() + values.sum()).backward()
    assert all(p.grad is not None for p in agent.parameters())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"GraphBody\(hidden=6\) must be a multiple of heads=4"):
        GraphBody(hidden=6)
    with pytest.raises(ConfigError, match="layers=0 must be >= 1"):
        GraphBody(layers=0)
    with pytest.raises(ConfigError, match=r"reads adjacency \(K, K\).* exists \(5,\)"):
        GraphBody(exists="time").build(SPACE)
    with pytest.raises(ConfigError, match="a multiple of graphs=3"):
        GraphBody(graphs=3).build(SPACE)
    with pytest.raises(ConfigError, match="no observation 'edges'"):
        GraphBody(adjacency="edges").build(SPACE)
    with pytest.raises(ConfigError, match="the action is Binary"):
        NodeHead().build(72, Binary(3))
    with pytest.raises(ConfigError, match="gets 10 features for 8 nodes"):
        NodeHead().build(10, Discrete(8))
