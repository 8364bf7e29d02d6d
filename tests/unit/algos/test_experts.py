"""Test the load-balancing loss, the replay of routing in updates, and the metrics of experts."""

import math

import pytest
import torch

from lightning_rl import K3Penalty, PolicyModule
from lightning_rl.algos.experts import ExpertLoad, balance_loss
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.extend import LoadBalance, OldRouting, RolloutRouting
from lightning_rl.models.routing import RouterOutputs
from tests.support.mixtures import saved_mixture
from tests.support.small_run import grpo
from tests.support.tolerances import scores_rounding


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return saved_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def module_of(mixture, **options) -> PolicyModule:
    module = grpo(mixture, **options)
    module.configure_model()
    return module


def router_outputs(load, probs, tokens=10, entropy=0.5, otherwise=0.0) -> RouterOutputs:
    load, probs = torch.tensor(load), torch.tensor(probs)
    experts = torch.zeros(tokens, len(load), 1, dtype=torch.int16)
    means = torch.full((len(load),), entropy), torch.tensor(otherwise)
    return RouterOutputs(probs, load, *means, experts)


def test_balance_loss_by_hand():
    # One layer, two experts, one each: f = (.75, .25), P = (.6, .4): 2 (.45 + .1) = 1.1
    assert float(balance_loss(router_outputs([[0.75, 0.25]], [[0.6, 0.4]]))) == pytest.approx(1.1)
    # Means over layers first: f = (.5, .5), P = (.5, .5): 2 (.25 + .25) = 1, as if it were even.
    two = router_outputs([[0.75, 0.25], [0.25, 0.75]], [[0.6, 0.4], [0.4, 0.6]])
    assert float(balance_loss(two)) == pytest.approx(1.0)


def test_balance_loss_is_that_of_transformers_with_its_gradient(mixture, make_rollout):
    module = module_of(mixture, balance=LoadBalance())
    rollout = make_rollout([3, 4, 5], [6, 7, 8, 9])
    ours = balance_loss(module.policy(pack_rollouts([rollout])).router_outputs)
    ours.backward()
    gates = [p for n, p in module.policy.lm.named_parameters() if n.endswith("gate.weight")]
    gradients = [gate.grad.clone() for gate in gates]
    module.policy.zero_grad()
    module.policy.lm.set_attn_implementation("eager")
    theirs = module.policy.lm(
        torch.tensor([[3, 4, 5, 6, 7, 8]]), output_router_logits=True
    ).aux_loss
    theirs.backward()
    bound = scores_rounding(module.policy.lm.config, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)
    for gradient, gate in zip(gradients, gates, strict=True):
        torch.testing.assert_close(gradient, gate.grad, rtol=1e-4, atol=1e-6)
        assert gate.grad.norm() > 0


def test_the_coefficient_is_the_models_own_unless_given(mixture):
    own = module_of(mixture, balance=LoadBalance()).objective.balance
    assert own == LoadBalance(0.001)  # Qwen3MoeConfig's
    assert module_of(mixture, balance=LoadBalance(0.5)).objective.balance == LoadBalance(0.5)
    assert module_of(mixture).objective.balance is None
    with pytest.raises(ConfigError, match="no router_aux_loss_coef"):
        LoadBalance().of_model(object(), "some/model")
    for wrong in (-0.1, math.inf):
        with pytest.raises(ConfigError, match=r"balance\.coef"):
            LoadBalance(wrong)


def test_balance_reaches_tokens_without_an_advantage(mixture, make_rollout):
    assert module_of(mixture).skipped.zero_advantage
    assert not module_of(mixture, balance=LoadBalance(0.1)).skipped.zero_advantage


def test_metrics_of_load_by_hand():
    load = ExpertLoad()
    assert load.compute() == {}
    # 10 tokens, two each of four experts; a second pass of 30 tokens counts three times as much.
    load.add(router_outputs([[1.0, 0.5, 0.5, 0.0]], [[0.25] * 4], 10, entropy=1.0, otherwise=0.2))
    load.add(router_outputs([[1.0, 1.0, 0.0, 0.0]], [[0.25] * 4], 30, entropy=0.6, otherwise=0.0))
    load.add(router_outputs([[0.0, 0.0, 0.0, 2.0]], [[0.25] * 4], 30), counts=False)
    found = load.compute()
    shares = [40 / 80, 35 / 80, 5 / 80]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    assert found == {
        "experts/busiest_share": pytest.approx(1.0),
        "experts/idlest_share": pytest.approx(0.0),
        "experts/overload": pytest.approx(2.0),  # half of all work, where a quarter is even
        "experts/dead_share": pytest.approx(0.25),
        "experts/load_entropy": pytest.approx(entropy),
        "experts/router_entropy": pytest.approx(0.7),
        "experts/replayed_otherwise": pytest.approx(0.05),
    }
    assert load.compute() == {}


def test_replay_needs_routers_and_rollouts_that_tell(tiny_model, mixture, make_rollout):
    for option in ({"routing_replay": OldRouting()}, {"balance": LoadBalance(0.1)}):
        with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no routers"):
            module_of(tiny_model, **option)
    module = module_of(mixture, routing_replay=RolloutRouting())
    with pytest.raises(ConfigError, match="no rollout of this batch recorded"):
        module.learner.compute_all(pack_rollouts([make_rollout([3], [4, 5])]))


def test_old_routing_is_recorded_with_the_old_logprobs_and_replayed(mixture, random_rollouts):
    module = module_of(mixture, routing_replay=OldRouting(), minibatches=2)
    batch = module.learner.compute_all(pack_rollouts(random_rollouts(0)))
    column = batch["tokens", "routed_experts"]
    assert (column >= 0).any()
    other = module_of(mixture, routing_replay=OldRouting()).learner.compute_all(
        pack_rollouts(random_rollouts(0))
    )
    assert "routed_experts" not in other["tokens"]  # one update: nothing was computed before
    with torch.no_grad():  # other weights, whose routers would choose otherwise
        for name, parameter in module.policy.lm.named_parameters():
            if name.endswith("gate.weight"):
                parameter += 0.3 * torch.randn_like(parameter)
    scores = module.policy(batch)
    places = (column >= 0).flatten(1).all(1)
    assert scores.router_outputs.otherwise > 0.1
    found, expected = scores.router_outputs.experts.flatten(0), column[places].flatten(0)
    assert set(found.unique().tolist()) <= set(expected.unique().tolist())


def test_a_reference_chooses_by_itself(mixture, random_rollouts):
    module = module_of(mixture, routing_replay=OldRouting(), kl=K3Penalty(0.1), minibatches=2)
    batch = module.learner.compute_all(pack_rollouts(random_rollouts(0)))
    plain = module_of(mixture)
    expected = plain.learner.score(pack_rollouts(random_rollouts(0)), "ref")["tokens", "ref"]
    batch["tokens", "routed_experts"] = (batch["tokens", "routed_experts"] + 1).clamp(max=7)
    found = module.learner.compute_ref_logprobs(batch)["tokens", "ref_logprobs"]
    assert torch.equal(found, expected)
    assert not torch.equal(module.policy.score(batch, "own", 10_000)["tokens", "own"], expected)
