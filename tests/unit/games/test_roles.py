"""Several policies in one module: each learns as it would alone; they share a base, and no more."""

from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_rl import LoRA
from lightning_rl.algos.advantages import GAE
from lightning_rl.callbacks import LogprobGapGuard, SkipUpdate, ZeroAdvantageGuard
from lightning_rl.config.hints import parse
from lightning_rl.data.batch import token_rows
from lightning_rl.engines import TransformersEngine
from lightning_rl.errors import ConfigError, GuardError
from lightning_rl.extend import MultiPolicyEngine, Periodic, pack_rollouts
from lightning_rl.games import RolesModule
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.rollout import Row
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.small_run import Rows, adamw, grpo
from tests.support.two_roles import group, roles_module

ROLES = ("first", "second")


@pytest.fixture(scope="module")
def two_roles(random_rollouts):
    """Make rollouts of two rows, one for each role, which are paid differently."""

    def make(seed: int):
        pairs = zip(random_rollouts(seed), random_rollouts(seed + 100), strict=True)
        rollouts = []
        for rollout, other in pairs:
            columns = (other.token_ids, other.loss_mask, other.logprobs, other.versions)
            rollout.rows[0].role = "first"
            rollout.rows += [Row(other.prompt.token_ids, *columns, role="second")]
            rollout.role_rewards = {"first": rollout.reward, "second": other.reward}
            rollouts.append(rollout)
        return rollouts

    return make


def batches_of(two_roles, roles=ROLES, count=3):
    return [pack_rollouts(two_roles(seed), roles=roles) for seed in range(count)]


def alone(rollouts, role: str):
    """Return the rows of one role, as rollouts of their own."""
    found = []
    for rollout in rollouts:
        [row] = [row for row in rollout.rows if row.role == role]
        prompt = type(rollout.prompt)("p", "", row.prompt_ids)
        reward = rollout.role_rewards[role]
        made = type(rollout)(
            prompt, rollout.group_id, rollout.sample_index, 0, rollout.sampling, [row],
            status=rollout.status, finish_reason="stop", reward=reward,
        )  # fmt: skip
        found.append(made)
    return found


def adapters(policy) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in policy.named_parameters() if ".lora_" in n}


def settings() -> dict[str, dict]:
    return {
        "first": {"optimizer": adamw(1e-2), "ppo_epochs": 2, "minibatches": 2},
        "second": {"optimizer": adamw(3e-3), "advantage": GAE(), "critic": SharedValueHead()},
    }


def test_each_policy_learns_what_it_would_learn_alone(tiny_model, train_on, two_roles):
    module = roles_module(tiny_model, **settings())
    module.configure_model()
    starts = {name: policy.state_dict() for name, policy in module.loaded_policies.items()}
    starts = {name: {k: v.clone() for k, v in s.items()} for name, s in starts.items()}
    train_on(module, batches_of(two_roles))
    for name in ROLES:
        single = grpo(tiny_model, lora=LoRA(rank=4), **settings()[name])
        single.configure_model()
        single.policy.load_state_dict(starts[name])
        train_on(single, [pack_rollouts(alone(two_roles(seed), name)) for seed in range(3)])
        after = dict(module.policies[name].policy.named_parameters())
        for key, weight in single.policy.named_parameters():
            assert torch.equal(weight, after[key]), (name, key)
        assert module.policies[name].iteration == 3
        moved = [not torch.equal(after[key], starts[name][key]) for key in adapters(single.policy)]
        assert all(moved)


def test_a_base_is_in_memory_once_and_in_no_checkpoint(tiny_model, train_on, two_roles, tmp_path):
    module = roles_module(tiny_model)
    trainer = train_on(module, batches_of(two_roles, count=1))
    assert {key.partition(".")[0] for key in module.state_dict()} == set(ROLES)
    first, second = (dict(policy.named_parameters()) for policy in module.loaded_policies.values())
    for name, weight in first.items():
        shared = weight.data_ptr() == second[name].data_ptr()
        assert shared is (".lora_" not in name), name
        assert weight.requires_grad is (".lora_" in name)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {name for name in module.state_dict() if ".lora_" in name}


def test_a_policy_that_trains_its_own_base_shares_none(tiny_model):
    own = {"lora": LoRA(rank=4, options={"modules_to_save": ["norm"]})}
    module = roles_module(tiny_model, second=own)
    module.configure_model()
    first, second = (dict(policy.named_parameters()) for policy in module.loaded_policies.values())
    assert all(
        first[name].data_ptr() != second[name].data_ptr() for name in first if name in second
    )
    full = roles_module(tiny_model, second={"lora": None})
    full.configure_model()
    assert all(p.requires_grad for p in full.policies["second"].policy.parameters())
    frozen = [p for n, p in full.policies["first"].policy.named_parameters() if ".lora_" not in n]
    assert not any(p.requires_grad for p in frozen)


def test_a_policy_that_is_not_due_stays_as_it_is(tiny_model, train_on, two_roles):
    module = roles_module(tiny_model, second={"schedule": Periodic(every=2, first=1)})
    module.configure_model()
    before, rows = adapters(module.policies["second"].policy), Rows()
    train_on(module, batches_of(two_roles, count=1), callbacks=[rows])
    for key, weight in adapters(module.policies["second"].policy).items():
        assert torch.equal(weight, before[key])
    assert "policy/first/loss" in rows.rows[-1]
    assert "policy/second/loss" not in rows.rows[-1]
    train_on(module, batches_of(two_roles, count=3))
    # Iterations 1 and 3 of 0 to 3.
    assert module.iteration == 4
    assert {name: p.iteration for name, p in module.policies.items()} == {"first": 4, "second": 2}
    assert module.role_versions == {"first": 4, "second": 2}


def test_a_policy_without_rows_learns_nothing(tiny_model, train_on, two_roles):
    rollouts = alone(two_roles(0), "first")
    module = roles_module(tiny_model)
    train_on(module, [pack_rollouts(rollouts, roles=list(module.roles))])
    assert {name: p.iteration for name, p in module.policies.items()} == {"first": 1, "second": 0}


def test_a_guard_acts_on_the_policy_that_broke_its_bound(tiny_model, train_on, two_roles):
    """The engine's logprobs of one role are far from the trainer's; the other's are its own."""
    module = roles_module(tiny_model)
    module.configure_model()
    batch = batches_of(two_roles, count=1)[0]
    for name in ROLES:
        module.policies[name].policy.score(batch, name, 10_000)
    own = (batch["rollouts", "role"] == 0)[token_rows(batch)]
    batch["tokens", "rollout_logprobs"] = torch.where(
        own, batch["tokens", "first"], batch["tokens", "second"] - 1.0
    )
    rows, guard = Rows(), LogprobGapGuard(bound=0.5, action=SkipUpdate())
    before = {name: adapters(policy) for name, policy in module.loaded_policies.items()}
    train_on(module, [batch], callbacks=[guard, rows])
    assert rows.rows[-1]["guard/first/logprob_gap"] == 0
    assert rows.rows[-1]["guard/second/logprob_gap"] == 1
    assert guard.in_a_row == {"first": 0, "second": 1}
    for name, changed in (("first", True), ("second", False)):
        after = adapters(module.policies[name].policy)
        same = all(torch.equal(after[key], before[name][key]) for key in after)
        assert same is not changed


def test_a_run_ends_when_a_policy_has_no_signal_left(tiny_model, train_on, two_roles):
    """A verifier that accepts everything pays all that one of two policies writes alike."""
    module, config = roles_module(tiny_model), yaml.safe_load(no_signal_left())
    [guard] = parse(list[Callback], config["trainer"]["callbacks"])
    assert isinstance(guard, ZeroAdvantageGuard)
    rows, batches = Rows(), []
    for rollouts in map(two_roles, range(guard.patience + 1)):
        for rollout in rollouts:
            rollout.role_rewards["second"] = 1.0
        batches.append(pack_rollouts(rollouts, roles=ROLES))
    words = f"without an advantage of policy second is 1, bound={guard.bound}"
    with pytest.raises(GuardError, match=words):
        train_on(module, batches, callbacks=[guard, rows])
    assert module.iteration == guard.patience
    told = [row["guard/second/zero_advantage"] for row in rows.rows[-guard.patience :]]
    assert told == [1.0] * guard.patience
    assert rows.rows[-1]["guard/first/zero_advantage"] == 0.0


def no_signal_left() -> str:
    """Return the configuration that the page of guards has for this."""
    section = (
        Path("docs/guards.md").read_text(encoding="utf-8").split("### Runs without a signal")[1]
    )
    return section.split("```yaml\n")[1].split("```")[0]


def test_roles_are_numbered_as_the_module_has_them(two_roles):
    rollouts = two_roles(0)
    assert pack_rollouts(rollouts)["rollouts", "role"][:2].tolist() == [0, 1]
    assert pack_rollouts(rollouts, roles=("second", "first"))["rollouts", "role"][0] == 1
    with pytest.raises(ConfigError, match=r"role 'second', which no policy plays.*play first"):
        pack_rollouts(rollouts, roles=("first",))


def test_what_cannot_be_is_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"role 'a' is played by both first and second"):
        roles_module(tiny_model, first={"roles": ["a"]}, second={"roles": ["b", "a"]})
    with pytest.raises(ConfigError, match="trains nothing"):
        RolesModule(str(tiny_model), {})
    with pytest.raises(ConfigError, match="'model' cannot be a policy's name"):
        RolesModule(str(tiny_model), {"model": group()})


def test_a_typo_in_a_policy_is_told_as_any_other(tiny_model):
    for init_args, message in (
        (
            {"lorra": {"rank": 4}},
            r"policies.a.init_args.lorra: no such key in RolePolicy; did",
        ),
        ({"schedule": {"class_path": "Periodc"}}, r"Periodc.*did you mean Periodic"),
        ({"update": {"ppo_epochs": 0}}, r"ppo_epochs=0 must be >= 1"),
    ):
        policy = {"class_path": "RolePolicy", "init_args": init_args}
        with pytest.raises(ConfigError, match=message):
            RolesModule(str(tiny_model), {"a": policy})


def test_transports_of_several_policies_do_not_meet(tmp_path):
    given = CheckpointTransport(str(tmp_path), keep=3, timeout_s=7)
    made = given.for_policy("first")
    assert (made.directory, made.keep, made.timeout_s) == (tmp_path / "first", 3, 7)
    memory = MemoryTransport(bucket_mb=2, timeout_s=7).for_policy("first")
    assert (memory.bucket_mb, memory.timeout_s) == (2, 7)
    with pytest.raises(ConfigError, match="CollectiveTransport carries the weights of one policy"):
        CollectiveTransport().for_policy("first")


def test_several_policies_need_engines_for_them():
    roles = {"a": "first", "b": "second"}
    with pytest.raises(ConfigError, match=r"2 are trained .first, second.; use MultiPolicyEngine"):
        TransformersEngine().serve(roles)
    one = MultiPolicyEngine({"first": TransformersEngine()})
    with pytest.raises(ConfigError, match="are for first, but the trained policies are first, s"):
        one.serve(roles)
    with pytest.raises(ConfigError, match="the trained policies are a single one"):
        one.serve({})
    both = MultiPolicyEngine({"first": TransformersEngine(), "second": TransformersEngine()})
    both.serve(roles)
    assert both.of_role("b") is both.of_policy("second") is both.engines["second"]
    with pytest.raises(ConfigError, match=r"no policy plays role ''; model.policies play a, b"):
        both.of_role("")
