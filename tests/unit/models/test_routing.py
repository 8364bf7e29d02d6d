"""Test routing: what a mixture's routers choose is heard, and what is given to them is replayed."""

import copy

import pytest
import torch
import transformers as hf

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.routing import to_text
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import Policy
from lightning_rl.models.routing import require_routing, routing_of
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.mixtures import KINDS, SHAPE, SIGMOIDS, saved_mixture
from tests.support.tolerances import scores_rounding
from tests.support.versions import need_transformers


@pytest.fixture(scope="module", params=KINDS)
def mixture(request, tmp_path_factory):
    return saved_mixture(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def policy(mixture):
    return Policy(str(mixture))


@pytest.fixture
def batch(random_rollouts):
    return pack_rollouts(random_rollouts(0))


def router_logits(policy, rollout):
    """Return transformers' logits (S, L, E), for a rollout less its last token."""
    lm = copy.deepcopy(policy.lm)
    lm.set_attn_implementation("eager")  # the packed one needs a layout
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids[:-1]]])
    with torch.no_grad():
        return torch.stack(lm(ids, output_router_logits=True).router_logits, 1)


def require_likeliest(config, experts, logits):
    """Require that two experts (S, L, 2) are as likely as the two likeliest, up to rounding."""
    assert (experts[..., 0] != experts[..., 1]).all()
    found = logits.gather(-1, experts.long()).sort(-1, descending=True).values
    bound = scores_rounding(config, logits)
    torch.testing.assert_close(found, logits.topk(2).values, rtol=0, atol=bound)


@pytest.mark.parametrize("max_tokens", [10_000, 8])
def test_recorded_experts_are_those_of_transformers(policy, batch, random_rollouts, max_tokens):
    """Micro-batches have any size, and rollouts share prompts."""
    policy.score(batch, "scores", max_tokens, record_routing=True)
    column, begin = batch["tokens", "routed_experts"], 0
    for rollout in random_rollouts(0):
        logits = router_logits(policy, rollout)
        end = begin + len(logits)
        require_likeliest(policy.lm.config, column[begin:end], logits)
        assert (column[end] == -1).all()  # it is in no pass
        begin = end + 1
    assert begin == len(column)


def test_what_is_not_scored_has_no_experts(policy, batch):
    policy.score(batch, "scores", 8, torch.tensor([0]), record_routing=True)
    length = int(batch["rollouts", "length"][0])
    column = batch["tokens", "routed_experts"]
    assert (column[: length - 1] >= 0).all()
    assert (column[length:] == -1).all()


def test_means_are_over_the_tokens_of_the_pass(policy, make_rollout):
    rollouts = [make_rollout([3, 4], [5, 6, 7]), make_rollout([3, 4], [8])]
    # The second adds no token to run.
    router_outputs = policy(pack_rollouts(rollouts)).router_outputs
    logits = router_logits(policy, rollouts[0])
    probs = logits.softmax(-1).transpose(0, 1)
    bound = scores_rounding(policy.lm.config, logits)
    torch.testing.assert_close(router_outputs.probs, probs.mean(1), rtol=0, atol=bound)
    entropy = -(probs * probs.log()).sum(-1).mean(1)
    torch.testing.assert_close(router_outputs.entropy, entropy, rtol=0, atol=bound)
    require_likeliest(policy.lm.config, router_outputs.experts, logits)
    count = torch.nn.functional.one_hot(router_outputs.experts.long(), probs.shape[-1]).sum((0, 2))
    assert torch.equal(router_outputs.load, count / 4)
    assert router_outputs.otherwise == 0


def test_a_replay_of_its_own_choice_changes_nothing_but_order(policy, batch):
    own = policy(batch)
    policy.score(batch, "scores", 10_000, record_routing=True)
    policy.replays = True
    again = policy(batch)
    assert torch.equal(again.logprobs, own.logprobs)
    assert again.router_outputs.otherwise == 0


def turned(policy, batch):
    """Return the batch with each token sent to experts beside those that the routers choose."""
    policy.score(batch, "scores", 10_000, record_routing=True)
    count = policy.lm.config.get_text_config()
    count = getattr(count, "num_experts", None) or count.num_local_experts
    column = batch["tokens", "routed_experts"]
    batch["tokens", "routed_experts"] = torch.where(column < 0, column, (column + 1) % count)
    return batch


def test_given_experts_compute_with_gates_of_the_routers_own_logits(policy, batch):
    """The test writes transformers' layers down anew, token by token."""
    batch = turned(policy, batch)
    policy.replays = True
    scores = policy(batch)
    assert scores.router_outputs.otherwise > 0.9
    plain = Policy(policy.model)
    given = iter(())

    def replace(router, inputs, output):
        logits, weights, _ = output
        chosen = next(given)
        probs = logits.softmax(-1)
        weights = torch.stack([row[places] for row, places in zip(probs, chosen, strict=True)])
        if type(router).__name__ == "MixtralTopKRouter" or router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    for name, part in plain.lm.named_modules():
        if name.endswith(".gate"):
            part.register_forward_hook(replace)
    plain.lm.set_attn_implementation("eager")
    begin, expected = 0, []
    for length in batch["rollouts", "length"].tolist():
        ids = batch["tokens", "input_ids"][begin : begin + length]
        column = batch["tokens", "routed_experts"][begin : begin + length - 1].long()
        given = iter(column.unbind(1))
        logits = plain.lm(input_ids=ids[None, :-1], use_cache=False).logits[0]
        temperature = batch["rollouts", "temperature"][len(expected)]
        logprobs = (logits / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        mask = batch["tokens", "loss_mask"][begin + 1 : begin + length]
        expected.append(logprobs[mask])
        begin += length
    expected = torch.cat(expected)
    bound = scores_rounding(policy.lm.config, expected)
    torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=bound)


def test_tokens_without_given_experts_are_the_routers(policy, batch):
    free = policy(batch).logprobs
    batch = turned(policy, batch)
    batch["tokens", "routed_experts"].fill_(-1)
    policy.replays = True
    assert torch.equal(policy(batch).logprobs, free)


def test_gradients_go_through_gates_also_if_layers_are_computed_again(mixture, batch):
    gradients = []
    for checkpointing in (False, True):
        policy = Policy(str(mixture), loading={"gradient_checkpointing": checkpointing})
        turned(policy, batch)
        policy.replays, policy.routing.balanced = True, True
        scores = policy(batch)
        (scores.logprobs.sum() + scores.router_outputs.probs.square().sum()).backward()
        gradients.append({n: p.grad for n, p in policy.lm.named_parameters()})
    plain, again = gradients
    assert all(float(plain[name].norm()) > 0 for name in plain if name.endswith("gate.weight"))
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_copy_has_routers_of_its_own(policy, batch):
    other = copy.deepcopy(policy)
    batch = turned(policy, batch)
    policy.replays = True
    replayed = policy(batch).logprobs
    free = other(batch).logprobs
    assert not torch.equal(free, replayed)
    assert torch.equal(policy(batch).logprobs, replayed)


def test_prompts_that_were_read_otherwise_are_scored_apart(policy, make_rollout):
    rollout = make_rollout([3, 4, 5], [6, 7])
    batch = turned(policy, pack_rollouts([rollout]))
    theirs = to_text(batch["tokens", "routed_experts"][:4])
    free = pack_rollouts([rollout])
    policy.score(free, "scores", 10_000, record_routing=True)
    ours = to_text(free["tokens", "routed_experts"][:4])
    policy.replays = True
    two = [make_rollout([3, 4, 5], [6, 7], routed_experts=text) for text in (ours, theirs)]
    alone = torch.cat([policy(pack_rollouts([one])).logprobs for one in two])
    together = policy(pack_rollouts(two)).logprobs
    bound = scores_rounding(policy.lm.config, alone)
    torch.testing.assert_close(together, alone, rtol=0, atol=bound)
    assert (alone[:2] - alone[2:]).abs().max() > 100 * bound


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        # Its routers take states of whole batches.
        (hf.AfmoeConfig, {"num_experts": 4, "moe_intermediate_size": 32, "num_dense_layers": 0}),
    ],
)
def test_models_without_known_routers_are_refused(tiny_model, config, sizes):
    assert routing_of(Policy(str(tiny_model)).lm) is None
    with torch.device("meta"):
        lm = hf.AutoModelForCausalLM.from_config(config(**SHAPE, **sizes))
    with pytest.raises(ConfigError, match=f"{type(lm).__name__} has no routers"):
        require_routing(lm)


def test_routers_have_names_of_their_own_for_a_factor():
    sizes = {"num_experts": 4, "moe_intermediate_size": 32, "router_scaling_factor": 2.0}
    with torch.device("meta"):
        lm = hf.AutoModelForCausalLM.from_config(hf.HYV3Config(**SHAPE, **sizes))
    logits, chosen = torch.zeros(1, 4), torch.tensor([[1, 3]])
    found = require_routing(lm)._weighing.gates(logits, chosen)
    assert found.tolist() == [[1.0, 1.0]]  # halves, twice


@pytest.fixture(scope="module", params=SIGMOIDS)
def sigmoids(request, tmp_path_factory):
    need_transformers("5.19", f"the experts of {request.param}")
    return Policy(str(saved_mixture(request.param, tmp_path_factory.mktemp(request.param))))


def test_routers_that_score_by_a_sigmoid_are_heard_and_replayed(sigmoids, make_rollout):
    rollout = make_rollout([3, 4], [5, 6, 7])
    batch = pack_rollouts([rollout])
    sigmoids.replays = False
    own = sigmoids(batch)
    scores = router_logits(sigmoids, rollout).sigmoid()
    expected = (scores / scores.sum(-1, keepdim=True)).mean(0)
    bound = scores_rounding(sigmoids.lm.config, expected)
    torch.testing.assert_close(own.router_outputs.probs, expected, rtol=0, atol=bound)
    sigmoids.score(batch, "scores", 10_000, record_routing=True)
    sigmoids.replays = True
    again = sigmoids(batch)
    torch.testing.assert_close(again.logprobs, own.logprobs, rtol=0, atol=bound)
    assert again.router_outputs.otherwise == 0
    assert sigmoids(turned(sigmoids, batch)).router_outputs.otherwise > 0.5


def test_gates_of_given_experts_are_scaled_sigmoids(sigmoids):
    """The test writes transformers' routers down anew."""
    config, routing = sigmoids.lm.config, sigmoids.routing
    logits = torch.linspace(-3, 3, 16).reshape(2, 8)
    chosen = torch.tensor([[0, 5], [7, 3]])
    weights = (1 / (1 + (-logits).exp())).gather(1, chosen)
    if getattr(config, "norm_topk_prob", True):
        weights = weights / weights.sum(1, keepdim=True)
    weights = weights * getattr(config, "routed_scaling_factor", 1.0)
    routing.begin(chosen[:, None].expand(-1, len(routing._layers), -1))
    found = routing._choose(0, torch.nn.Identity(), (), (logits, weights.flip(0), chosen.flip(0)))
    torch.testing.assert_close(found[1], weights)
    assert torch.equal(found[2], chosen)


def test_one_mixture_of_softmax_shares_among_the_chosen_is_known():
    """OLMoE has such probabilities, and Qwen3-MoE such shares."""
    config = hf.OlmoeConfig(**SHAPE, num_experts=4)
    assert routing_of(hf.AutoModelForCausalLM.from_config(config)) is not None


def test_experts_of_all_layers_are_taken_where_some_have_none(tmp_path, make_rollout):
    """vLLM tells anything for a layer without experts."""
    config = KINDS["qwen3_moe"]()
    config.update({"num_hidden_layers": 3, "mlp_only_layers": [1]})
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    policy = Policy(str(tmp_path))
    batch = turned(policy, pack_rollouts([make_rollout([3, 4, 5], [6, 7])]))
    policy.replays = True
    column = batch["tokens", "routed_experts"]
    expected = policy(batch).logprobs
    batch["tokens", "routed_experts"] = column[:, [0, 1, 1]]
    assert torch.equal(policy(batch).logprobs, expected)
    batch["tokens", "routed_experts"] = column[:, :1]
    with pytest.raises(ConfigError, match="experts of 1 layers cannot be replayed by 2 routers"):
        policy(batch)
