"""Test every option that convert carries over: what is written, against the peers' own formulas.

The options come from convert's tables. For each, our classes are made as the converted
configuration has them, and value and gradient of their loss are held against ``peer_objectives``:
equal to 1e-6, or convert says that they are not. A new option has to be put into ``SWEEPS``, or
among those that decide no formula.
"""

import itertools

import pytest
import torch

from lightning_rl import Critic, PolicyModule
from lightning_rl.algos.objective import Objective, loss_tokens
from lightning_rl.convert.checked import PARTS, part_of
from lightning_rl.convert.conversion import Conversion, sections, table
from lightning_rl.convert.prime_rl import convert_prime_rl
from lightning_rl.convert.trl import convert_trl
from lightning_rl.convert.verl import convert_verl
from lightning_rl.data.batch import select, token_rows
from lightning_rl.extend import ValueLoss
from lightning_rl.models.policy import Scores
from tests.support.peer_objectives import (
    Leaves,
    Padded,
    Sampled,
    prime_objective,
    trl_objective,
    verl_objective,
)

GROUPS, SIZE = 4, 3
ACTOR, ALGORITHM = "actor_rollout_ref.actor.", "algorithm."
CORRECTION = "algorithm.rollout_correction."

TRL_BASE = {"num_generations": SIZE, "per_device_train_batch_size": GROUPS * SIZE,
            "num_iterations": 2, "max_completion_length": 8}  # fmt: skip
TRL_LOSSES = [{"loss_type": kind} for kind in table("trl")["loss_type"].values]
VLLM = {"use_vllm": True}
# Values of an option, and what stands beside it. Those with a list in the table are taken from it.
TRL_SWEEPS = {
    "loss_type": (None, [{}, {"importance_sampling_level": "sequence"}]),
    "epsilon": ([0.1], TRL_LOSSES),
    "epsilon_high": ([0.3, 5.0], TRL_LOSSES),
    "delta": ([4.0, 1.1, 0.9], [*TRL_LOSSES, {"importance_sampling_level": "sequence"}]),
    "importance_sampling_level": (None, TRL_LOSSES),
    "sapo_temperature_pos": ([2.0], TRL_LOSSES),
    "sapo_temperature_neg": ([2.0], TRL_LOSSES),
    **{name: ([0.5], TRL_LOSSES) for name in table("trl") if name.startswith("vespo_")},
    "off_policy_mask_threshold": ([0.2], [VLLM | x for x in TRL_LOSSES]),
    "scale_rewards": (["group", "batch", "none", True, False], [{}]),
    "multi_objective_aggregation": (None, [{}, {"scale_rewards": "none"}]),
    "mask_truncated_completions": ([True, False], TRL_LOSSES),
    "entropy_coef": ([0.01], TRL_LOSSES),
    "vllm_importance_sampling_correction": ([True, False], [VLLM | x for x in TRL_LOSSES]),
    "vllm_importance_sampling_mode": (None, [VLLM, VLLM | {"loss_type": "grpo"}]),
    "vllm_importance_sampling_clip_max": ([1.5, None, 0.9], [VLLM]),
    "vllm_importance_sampling_clip_min": (
        [0.8],
        [VLLM, VLLM | {"vllm_importance_sampling_mode": "token_truncate"}],
    ),
    "vllm_importance_sampling_cap": ([1.5], [VLLM]),
    "beta": ([0.1], TRL_LOSSES),
    "use_bias_correction_kl": (
        [True, False],
        [
            {"beta": 0.1, **more, **epochs}
            for more in ({}, {"importance_sampling_level": "sequence"})
            for epochs in ({}, {"num_iterations": 1})
        ],
    ),
    "gradient_accumulation_steps": (
        [3],
        [{"per_device_train_batch_size": 4, "epsilon_high": 5.0} | x for x in TRL_LOSSES],
    ),
    "steps_per_generation": (
        [2],
        [{"per_device_train_batch_size": 6, "epsilon_high": 5.0} | x for x in TRL_LOSSES],
    ),
}
TRL_WITHOUT_FORMULA = {
    # They decide how a coefficient moves.
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
    "entropy_target",
    # They decide which weights the reference has, and how often.
    "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha",
    # These say how many, how long and how often; see above for accumulation and minibatches.
    "per_device_train_batch_size", "generation_batch_size", "num_iterations", "max_steps",
    "num_train_epochs",
}  # fmt: skip

VERL_BASE = {
    "actor_rollout_ref.rollout.n": SIZE,
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": GROUPS,
    "data.max_response_length": 64,
}
VERL_LOSSES = [{ACTOR + "policy_loss.loss_mode": m}
               for m in table("verl")[ACTOR + "policy_loss.loss_mode"].values]  # fmt: skip
VERL_MODES = [{ACTOR + "loss_agg_mode": mode}
              for mode in table("verl")[ACTOR + "loss_agg_mode"].values]  # fmt: skip
GAE = {"algorithm.adv_estimator": "gae"}
KL, KL_REWARD = {ACTOR + "use_kl_loss": True}, {ALGORITHM + "use_kl_in_reward": True}
TOKENS, SEQUENCES = {CORRECTION + "rollout_is": "token"}, {CORRECTION + "rollout_is": "sequence"}
BYPASS = {CORRECTION + "bypass_mode": True}
REINFORCE = BYPASS | {CORRECTION + "loss_type": "reinforce"}
REJECTED = [{CORRECTION + "rollout_rs": kind, CORRECTION + "rollout_rs_threshold": "0.9_1.2"}
            for kind in table("verl")[CORRECTION + "rollout_rs"].values]  # fmt: skip
VERL_SWEEPS = {
    "algorithm.adv_estimator": (None, [{}, KL_REWARD, {"actor_rollout_ref.rollout.n": 1}]),
    "algorithm.gamma": ([0.9], [GAE, {"algorithm.adv_estimator": "reinforce_plus_plus"}]),
    "algorithm.lam": ([0.8], [GAE]),
    "algorithm.norm_adv_by_std_in_grpo": ([True, False], [{}]),
    "algorithm.use_kl_in_reward": ([True, False], [{}, GAE]),
    "algorithm.kl_penalty": (None, [KL_REWARD, KL_REWARD | GAE]),
    "algorithm.kl_ctrl.kl_coef": ([0.2], [KL_REWARD]),
    CORRECTION + "rollout_is": (None, VERL_LOSSES),
    CORRECTION + "rollout_is_threshold": (["0.6_1.5", 1.1, None], [TOKENS, SEQUENCES]),
    CORRECTION + "rollout_rs": (None, [{CORRECTION + "rollout_rs_threshold": "0.9_1.2"}]),
    CORRECTION + "rollout_rs_threshold": (
        ["0.95_1.3", 1.2],
        [x | y for x in REJECTED for y in (TOKENS, SEQUENCES, {ACTOR + "loss_agg_mode":
                                                                "seq-mean-token-sum"})],
    ),
    CORRECTION + "bypass_mode": ([True], [{}, TOKENS, SEQUENCES, REINFORCE, REINFORCE | TOKENS,
                                          REINFORCE | SEQUENCES, *REJECTED, *VERL_LOSSES]),
    CORRECTION + "loss_type": (None, [BYPASS, BYPASS | TOKENS]),
    ACTOR + "clip_ratio": ([0.1], [{}, {ACTOR + "clip_ratio_low": None}]),
    ACTOR + "clip_ratio_low": ([0.1], VERL_LOSSES),
    ACTOR + "clip_ratio_high": ([0.3], VERL_LOSSES),
    ACTOR + "clip_ratio_c": ([1.5], VERL_LOSSES),
    ACTOR + "policy_loss.loss_mode": (None, VERL_MODES),
    ACTOR + "tau_pos": ([2.0], VERL_LOSSES),
    ACTOR + "tau_neg": ([2.0], VERL_LOSSES),
    ACTOR + "loss_agg_mode": (None, [{}, GAE, KL, {ACTOR + "entropy_coeff": 0.01}]),
    ACTOR + "loss_scale_factor": ([32], VERL_MODES),
    ACTOR + "entropy_coeff": ([0.01], VERL_LOSSES),
    ACTOR + "use_kl_loss": ([True, False], VERL_LOSSES),
    ACTOR + "kl_loss_coef": ([0.2], [KL]),
    ACTOR + "kl_loss_type": (None, [KL]),
    "critic.cliprange_value": ([0.2], [GAE]),
}  # fmt: skip
VERL_WITHOUT_FORMULA = {
    # These say how a coefficient moves, which groups are kept, and which weights are the critic's.
    "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl",
    "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches",
    "algorithm.filter_groups.metric",
    "critic.enable", "trainer.critic_warmup", "critic.loss_agg_mode",
    # These say how many, and how long; and what happens to a gradient.
    ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_epochs", ACTOR + "use_dynamic_bsz",
    ACTOR + "ppo_max_token_len_per_gpu", ACTOR + "grad_clip", ACTOR + "strategy",
    "critic.grad_clip", "critic.ppo_epochs", "critic.ppo_mini_batch_size",
    *(name for name in table("verl") if ".optim." in name),
}  # fmt: skip

LOSS, ALGO = "trainer.loss.", "orchestrator.algo."
PRIME_BASE = {"orchestrator.batch_size": GROUPS * SIZE, "orchestrator.group_size": SIZE,
              "orchestrator.train.source": [{"env": {"taskset": {"id": "e"}}}]}  # fmt: skip
PRIME_LOSSES = [{ALGO + "type": kind} for kind in ("grpo", "max_rl")]
PRIME_SWEEPS = {
    LOSS + "type": (None, PRIME_LOSSES),
    **{LOSS + f"dppo_mask_{side}": ([0.01, 0.5, 2.0], PRIME_LOSSES) for side in ("low", "high")},
    LOSS + "adv_tau": ([0.5, 2.0], PRIME_LOSSES),
    LOSS + "kl_tau": ([0.0, 0.1], PRIME_LOSSES),
    ALGO + "type": (["grpo", "max_rl", "rae"], [{}]),
    ALGO + "decay": ([0.5], [{ALGO + "type": "rae"}]),
}
PRIME_WITHOUT_FORMULA = {
    # These say which rollouts are counted, and who the teacher is.
    "orchestrator.train.filter_zero_advantages", ALGO + "demo_key", ALGO + "template",
    *(name for name in table("prime_rl") if ".teacher." in name),
}  # fmt: skip

LEARNING = {
    "prime_rl": ("Loss and algorithm",),
    "trl": ("Batches and steps", "Loss and advantages", "Reference model"),
    "verl": ("Advantages and corrections", "Actor", "Critic"),
}
SWEEPS = {"trl": TRL_SWEEPS, "verl": VERL_SWEEPS, "prime_rl": PRIME_SWEEPS}
WITHOUT = {
    "trl": TRL_WITHOUT_FORMULA,
    "verl": VERL_WITHOUT_FORMULA,
    "prime_rl": PRIME_WITHOUT_FORMULA,
}
BASES = {"trl": TRL_BASE, "verl": VERL_BASE, "prime_rl": PRIME_BASE}
TABLES = {library: table(library) for library in LEARNING}
DEFAULTS = {name: {key: row.default for key, row in of.items()} for name, of in TABLES.items()}


def rows(library):
    return [row for title in LEARNING[library] for row in sections(library)[title] if row.ours]


def cases(library):
    """Yield an option's name, and the options that are set."""
    for row in rows(library):
        if row.theirs in WITHOUT[library]:
            continue
        values, besides = SWEEPS[library].get(row.theirs, ([], []))
        for value, beside in itertools.product(row.values if values is None else values, besides):
            said = BASES[library] | beside | {row.theirs: value}
            shown = [f"{name.rpartition('.')[2]}={v}" for name, v in (beside | said).items()
                     if name == row.theirs or name in beside]  # fmt: skip
            yield pytest.param(library, said, id=f"{library}-{'-'.join(shown)}")


@pytest.mark.parametrize("library", LEARNING)
def test_each_option_has_a_formula(library):
    known = SWEEPS[library].keys() | WITHOUT[library]
    assert [row.theirs for row in rows(library) if row.theirs not in known] == []
    empty = [name for name, (values, _) in SWEEPS[library].items() if values is None]
    assert all(TABLES[library][name].values for name in empty)


@pytest.fixture(scope="module")
def batches(random_batch):
    """Make float64 batches whose logprobs moved: by group size, and on-policy or not."""

    def make(group_size, on_policy):
        batch = random_batch(11, groups=GROUPS * SIZE // group_size, group_size=group_size,
                             longest=12)  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        tokens, rollouts = batch["tokens"], batch["rollouts"]
        live = tokens["loss_mask"]
        for name in ("old_logprobs", "ref_logprobs", "values", "logprobs", "rollout_logprobs"):
            noise = torch.randn(len(live), generator=generator, dtype=torch.double)
            scale = {"rollout_logprobs": 0.3, "logprobs": 0.8}.get(name, 1.0)
            near = tokens["old_logprobs"] if scale < 1 else -2.0
            tokens[name] = (noise * scale + near) * live
        if on_policy:
            tokens["logprobs"] = tokens["old_logprobs"].clone()
        shape = {"generator": generator, "dtype": torch.double}
        parts = torch.rand(len(rollouts), 2, **shape)
        parts[-1, 0] = torch.nan  # one that does not apply
        weights = torch.tensor([1.0, 0.5], dtype=torch.double).expand_as(parts)
        rollouts["reward_parts"], rollouts["part_weights"] = parts, weights
        rollouts["reward"] = (parts * weights).nansum(1)
        rollouts["baseline"] = torch.rand(12, **shape)[rollouts["group"]]
        rollouts["truncated"] = torch.arange(len(rollouts)) % 4 == 2
        tokens["entropy"] = torch.rand(len(live), **shape)
        tokens["now_values"] = tokens["values"] + torch.randn(len(live), **shape)
        return batch

    keys = itertools.product((1, SIZE), (False, True))
    return {key: make(*key) for key in keys}


LEAVES = {"logprobs": "logprobs", "entropy": "entropy", "values": "now_values"}


def theirs_of(objective, options, batch, leaves):
    padded, tokens, rollouts = Padded(batch), batch["tokens"], batch["rollouts"]
    names = {"old": "old_logprobs", "engine": "rollout_logprobs", "reference": "ref_logprobs"}
    sampled = Sampled(
        mask=padded(tokens["loss_mask"].double()),
        values=padded(tokens["values"]),
        rewards=rollouts["reward"],
        truncated=rollouts["truncated"],
        parts=rollouts["reward_parts"],
        weights=rollouts["part_weights"],
        greedy=rollouts["baseline"],
        group_size=int((rollouts["group"] == 0).sum()),
        **{name: padded(tokens[held]) for name, held in names.items()},
    )
    return objective(options, sampled, Leaves(*(padded(leaf) for leaf in leaves)))


def ours_of(result: Conversion, batch, leaves):
    """Return the first minibatch's loss, put together as a PolicyModule does it."""
    model = result.config["model"]["init_args"]
    parts = {name: part_of(model[name]) for name in PARTS if name in model}
    batch = batch.clone()
    tokens, rollouts = batch["tokens"], batch["rollouts"]
    if model["update"].get("use_rollout_logprobs"):
        tokens["old_logprobs"] = tokens["rollout_logprobs"].clone()
    if (in_reward := parts.pop("kl_reward", None)) is not None:
        kl = in_reward(tokens["old_logprobs"], tokens["ref_logprobs"])
        tokens["token_rewards"] = -in_reward.coef.at(0) * kl * tokens["loss_mask"]
    for weight in result.config["data"]["init_args"].get("reward_weights", []):
        rollouts["reward"] = rollouts["reward"] * weight
    tokens["index"] = torch.arange(len(tokens))
    batch = parts.pop("advantage")(batch)
    minibatches = model["update"]["minibatches"]
    first = select(batch, torch.arange(len(rollouts) // minibatches))
    tokens = first["tokens"]
    if model["update"].get("mask_truncated"):
        cut = first["rollouts", "truncated"][token_rows(first)]
        tokens["loss_mask"] = tokens["loss_mask"] & ~cut
    weights = parts.pop("aggregation")(first)
    live = tokens["loss_mask"].nonzero().squeeze(1)
    value_loss = ValueLoss(**model["critic"]["loss"]) if "critic" in model else None
    scores = Scores(live, *(leaf[tokens["index"][live]] for leaf in leaves))
    objective = Objective(value_loss=value_loss, **parts)
    return (weights[live] * objective(scores, loss_tokens(first, scores), 0)[0]).sum()


def value_and_gradients(found, leaves):
    gradients = torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True)
    return found.detach(), torch.cat(gradients)


CONVERTERS = {"trl": convert_trl, "verl": convert_verl, "prime_rl": convert_prime_rl}
OBJECTIVES = {"trl": trl_objective, "verl": verl_objective, "prime_rl": prime_objective}


def converted(library, said):
    return CONVERTERS[library](said)


@pytest.mark.parametrize(("library", "said"), [case for name in LEARNING for case in cases(name)])
def test_what_is_written_is_theirs_or_said_to_differ(library, said, batches):
    options = DEFAULTS[library] | said
    result = converted(library, said)
    steps = said.get("num_iterations", 2) * said.get("steps_per_generation", 1)
    alone = said.get("actor_rollout_ref.rollout.n") == 1
    batch = batches[1 if alone else SIZE, library == "trl" and steps == 1]
    leaves = [batch["tokens", name].clone().requires_grad_() for name in LEAVES.values()]
    objective = OBJECTIVES[library]
    value, gradient = value_and_gradients(theirs_of(objective, options, batch, leaves), leaves)
    ours, our_gradient = value_and_gradients(ours_of(result, batch, leaves), leaves)
    assert alone or gradient.abs().max() > 1e-3
    close = {"rtol": 1e-6, "atol": 1e-6 * float(gradient.abs().max())}
    same = torch.allclose(our_gradient, gradient, **close)
    names = SWEEPS[library].keys()
    told = [item.key for item in result.left if item.key in names]
    apart = float((our_gradient - gradient).norm() / gradient.norm())
    assert same == (not told), (apart, told)
    if same and not torch.isclose(ours, value, rtol=1e-6, atol=1e-9):
        assert "is logged is k2's" in " ".join(result.remarks), (float(ours), float(value))


SEQUENCE = {"importance_sampling_level": "sequence"}
EXACT = [
    *(("trl", x) for x in TRL_LOSSES if x["loss_type"] != "cispo"),
    *(("trl", SEQUENCE | {"loss_type": kind}) for kind in ("grpo", "luspo", "dapo")),
    *(("trl", {"delta": delta} | more) for delta in (4.0, 1.1) for more in ({}, SEQUENCE)),
    ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}),
    ("trl", {"loss_type": "sapo", "mask_truncated_completions": True}),
    ("trl", {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": False}),
    ("trl", {"beta": 0.1, "num_iterations": 1}),
    ("trl", {"beta": 0.1, "use_bias_correction_kl": False}),
    ("trl", VLLM),
    *(("verl", x) for x in VERL_LOSSES),
    *(("verl", x | {ACTOR + "loss_agg_mode": "seq-mean-token-sum"}) for x in REJECTED),
    *(("verl", GAE | x) for x in VERL_MODES if "token-sum" not in x.values()),
    *(("verl", x) for x in (KL, KL_REWARD, TOKENS, SEQUENCES, BYPASS | TOKENS, REINFORCE | TOKENS)),
    ("verl", {"algorithm.adv_estimator": "reinforce_plus_plus"}),
    *(("verl", x | {"algorithm.adv_estimator": "remax"}) for x in ({}, KL_REWARD)),
    ("verl", {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}),
    *(("prime_rl", x) for x in (*PRIME_LOSSES, {LOSS + "adv_tau": 0.5}, {LOSS + "kl_tau": 0.0})),
]


@pytest.mark.parametrize(("library", "said"), EXACT)
def test_nothing_is_said_to_differ_where_nothing_has_to(library, said):
    result = converted(library, BASES[library] | said)
    assert [item.key for item in result.left if item.key in SWEEPS[library]] == []


@pytest.mark.parametrize(
    ("library", "said"),
    [*EXACT, ("verl", BYPASS | SEQUENCES), *(("verl", BYPASS | x) for x in REJECTED)],
)
def test_what_is_written_is_accepted_together(library, said):
    """A correction beside bypass_mode once was not."""
    written = converted(library, BASES[library] | said).config["model"]["init_args"]
    parts = {name: part_of(written[name]) for name in PARTS if name in written}
    if "critic" in written:
        critic = dict(written["critic"])
        head, loss = part_of(critic.pop("head")), ValueLoss(**critic.pop("loss"))
        parts["critic"] = Critic(head, loss, **critic)
    module = PolicyModule("model", update=written["update"], **parts)
    assert module.objective.correction is parts.get("correction")


def test_the_bounds_of_verls_rejection_are_on_one_over_w():
    # Kept where 0.5 <= 1 / w <= 4: a token of weight 3 is dropped, one of 0.3 kept.
    said = {CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": "0.5_4.0"}
    correction = part_of(
        converted("verl", VERL_BASE | said).config["model"]["init_args"]["correction"]
    )
    weights = correction.weights(torch.tensor([3.0, 0.3, 0.2, 1.9]).log(), torch.arange(4))
    assert weights.tolist() == [0.0, 1.0, 0.0, 1.0]
