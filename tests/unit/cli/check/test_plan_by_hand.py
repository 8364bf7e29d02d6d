"""Test an update's batches and memory, by hand and against the update itself."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from benchmarks.support.allocations import FollowAllocations
from lightning_rl import LoRA, ModelReward, ModelTeacher, PolicyModule, SharedValueHead
from lightning_rl.cli.check.batches import BatchPlan, cut, largest_rollouts
from lightning_rl.cli.check.memory import in_units, training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.cli.check.training import Learning, training_plan
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.extend import Periodic
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt
from tests.support.followed import kept_for_backward
from tests.support.small_run import data_module as small_data, trainer_of
from tests.support.tiers import follows_memory
from tests.support.two_roles import roles_data, roles_module


def test_batch_algebra_by_hand():
    plan = BatchPlan(
        prompts=100, groups=12, group_size=8, ranks=2, tokens=960, minibatches=3, ppo_epochs=2,
        micro_batches=2, micro_batch_tokens=200, iterations_per_epoch=10, epochs=4,
    )  # fmt: skip
    assert (plan.rollouts, plan.steps, plan.total_steps) == (96, 6, 240)
    lines = list(plan.lines())
    # 12 groups in 3 minibatches are 4 each, and one rank may have them all.
    assert lines[1].startswith(
        "on each of 2 ranks 3 minibatches of 4 groups or fewer, in 2 micro-batches"
    )
    assert "60 per epoch of 10 iterations" in lines[2]
    # 12 prompts x 40 iterations = 480 of 100.
    assert "480 prompts are drawn from 100 (4.8 times each)" in lines[3]


def test_micro_batches_are_those_of_the_update():
    prompts = [Prompt(str(n), "", [3] * n) for n in (2, 5, 3)]
    rollouts = largest_rollouts(prompts, groups=2, group_size=3, max_tokens=4)
    assert [len(r.prompt.token_ids) for r in rollouts] == [5, 5, 5, 3, 3, 3]  # the longest two
    batch = pack_rollouts(rollouts)
    [[whole]] = cut(batch, 1, 1000)
    assert forward_tokens(whole) == 5 + 3 * 4 + 3 + 3 * 4
    # 17 tokens do for the first group; the second's three need 3 + 12 = 15.
    assert [forward_tokens(micro_batch) for micro_batch in cut(batch, 1, 17)[0]] == [17, 15]
    assert [len(micro_batches) for micro_batches in cut(batch, 2, 1000)] == [1, 1]


def test_memory_by_hand(tiny_model):
    policy = Policy(str(tiny_model))
    elements = sum(p.numel() for p in policy.parameters())
    rollouts = largest_rollouts([Prompt("0", "", [3, 2])], 2, 2, 6)
    plan = training_memory(policy, [], torch.optim.AdamW, pack_rollouts(rollouts))
    assert plan.parts["weights"] == plan.parts["gradients"] == 4 * elements
    assert plan.parts["optimizer (AdamW)"] == 8 * elements  # two moments in float32
    # The head's gradient, 16 words of 64 numbers, before it is added to its embedding's.
    assert plan.moment == "the head's backward pass"
    assert plan.parts["copies of weights"] == 4 * 16 * 64
    assert plan.total == sum(plan.parts.values())
    plain = training_memory(policy, [policy], torch.optim.SGD, pack_rollouts(rollouts))
    assert plain.parts["optimizer (SGD)"] == 0
    assert plain.parts["other models"] == 4 * elements
    assert [in_units(3 << 19), in_units(5 << 29)] == ["1.5 MiB", "2.50 GiB"]


def test_activations_grow_with_the_tokens(tiny_model):
    policy = Policy(str(tiny_model))

    def kept(groups: int) -> float:
        prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(groups)]
        micro_batch = pack_rollouts(largest_rollouts(prompts, groups, 4, 20))
        return kept_for_backward(policy, micro_batch) / forward_tokens(micro_batch)

    # One group stands for eight: that is how the estimate is made.
    assert kept(8) == pytest.approx(kept(1), rel=0.05)
    # Two layers, each with at least its inputs in float32: 64 numbers to four projections.
    assert kept(1) > 2 * 4 * 64 * 4


def test_a_measured_policy_is_freed(tiny_model):
    policy = Policy(str(tiny_model))
    micro_batch = pack_rollouts(largest_rollouts([Prompt("0", "", [3, 2])], 1, 2, 6))
    kept_for_backward(policy, micro_batch)
    weight = weakref.ref(next(policy.parameters()))
    del policy
    gc.collect()
    assert weight() is None


@follows_memory
def test_memory_of_two_policies_is_what_their_updates_take(tiny_model, tmp_path):
    """Estimated, and followed from allocation to allocation in an update of both."""
    # The second keeps more of a pass, and the optimizer's state of both stays.
    second = {"lora": LoRA(rank=8), "ppo_epochs": 2, "schedule": Periodic(every=2)}
    module, data, follow = (
        roles_module(tiny_model, second=second),
        roles_data(),
        FollowAllocations(),
    )
    trainer = trainer_of(tmp_path, [follow])
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.load_prompts("fit")
    module.configure_model()
    prompts = data.train_prompts.first()
    lines, memory = training_plan(module, data, prompts, torch.device("cpu"))
    assert [line for line in lines if line.startswith("batches of ")] == [
        "batches of first:", "batches of second:",
    ]  # fmt: skip
    assert any("2 optimizer steps per iteration, 4 per epoch of 4 it" in line for line in lines)
    assert "  it learns in 2 iterations of the first epoch" in lines
    storages = {p.untyped_storage().data_ptr(): p.numel() * 4 for p in module.parameters()}
    assert memory.parts["weights"] == sum(storages.values())  # the base once
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert memory.stays["gradients"] == 4 * trained
    assert memory.parts["optimizer (AdamW)"] == 8 * trained
    rollouts = largest_rollouts(prompts, 4, 4, data.sampling.max_tokens)
    for rollout in rollouts:
        rollout.reward = float(rollout.sample_index % 2)
        [row] = rollout.rows
        rollout.rows = [replace(row, role="first"), replace(row, role="second")]
    trainer.fit(module, LazyLoader(lambda _: pack_rollouts(rollouts, roles=[*module.roles]), 1))
    assert module.role_versions == {"first": 1, "second": 1}
    assert memory.total == pytest.approx(follow.peak + memory.parts["weights"], rel=0.1)


def test_models_of_rewards_are_planned_from_their_configurations(tiny_model, tmp_path):
    """A teacher's weights are as many as the policy's; a reward model adds 64 for its score."""
    AutoConfig.from_pretrained(tiny_model, num_labels=1).save_pretrained(tmp_path / "scorer")
    path, scorer = str(tiny_model), str(tmp_path / "scorer")
    rewards = [
        ModelTeacher(path, dtype="bfloat16"),
        ModelTeacher(path, device="cpu", name="on_host"),
        ModelReward(scorer, device="cuda"),
        ModelReward(scorer, device="cuda:1", name="on_another"),
    ]
    module, data = PolicyModule(str(tiny_model)), small_data(rewards=rewards)
    trainer = trainer_of(tmp_path, [])
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.load_prompts("fit")
    module.configure_model()
    learning = Learning(module, data, data.train_prompts.first(), 1)
    elements = sum(p.numel() for p in module.parameters())
    # The teacher whose device is open and the reward model are both on the GPU.
    _, memory = learning.told(Placement(torch.device("cuda")))
    on_gpu = 2 * elements + 4 * (elements + 64)
    assert memory.parts["other models, of rewards"] == on_gpu
    assert memory.stays["other models, of rewards"] == on_gpu
    assert memory.host == {"other models, of rewards": 4 * elements}
    _, memory = learning.told(Placement())
    assert memory.parts["other models, of rewards"] == (2 + 4) * elements
    assert memory.host == {}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_plan_without_weights_is_the_one_with_them(tiny_model, tmp_path, precision):
    plans = []
    for device in ("cpu", "meta"):
        module, data = PolicyModule(str(tiny_model), critic=SharedValueHead()), small_data()
        trainer = trainer_of(tmp_path, [], precision=precision)
        trainer.strategy.connect(module)
        data.trainer = module.trainer = trainer
        data.load_prompts("fit")
        with torch.device(device):
            module.configure_model()
        prompts = data.train_prompts.first()
        plans.append(training_plan(module, data, prompts, torch.device("cpu")))
    assert plans[0] == plans[1]
