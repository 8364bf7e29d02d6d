"""Test PolicyModule: the update's gradient, its named steps, its metrics, its refusals."""

import math
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser
from transformers import AutoModelForCausalLM

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.algos.kl import K3Penalty
from lightning_rl.algos.losses import ValueLoss
from lightning_rl.algos.objective import Objective, SequenceMean, TokenMean
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.learn.backends import TorchBackend
from lightning_rl.learn.critic import Critic
from lightning_rl.learn.learner import Learner
from lightning_rl.learn.schedulers import WarmupLinear
from lightning_rl.learn.update_settings import UpdateSettings
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.models.policy import Policy
from lightning_rl.models.reference import FrozenReference
from lightning_rl.module import PolicyModule
from tests.support.grouped import grouped
from tests.support.small_run import Rows
from tests.support.tolerances import distance, gradient_rounding, scores_rounding
from tests.support.updates import assert_close, last_gradients, sgd


def module_of(tiny_model, **options) -> PolicyModule:
    options = {"optimizer": sgd, "max_grad_norm": None} | options
    return PolicyModule(str(tiny_model), **grouped(**options))


def with_critic(tiny_model, **options) -> PolicyModule:
    """Make PPO with a KL penalty and a critic whose predictions are not zero."""
    module = module_of(
        tiny_model, advantage=GAE(), critic=SharedValueHead(), kl=K3Penalty(0.1), **options
    )
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    module.policy.value_head.linear.weight.data.normal_(std=0.3, generator=generator)
    return module


@pytest.mark.parametrize("aggregation", [TokenMean(), SequenceMean()])
def test_the_grpo_gradient_is_the_policy_gradient(
    tiny_model, train_on, random_rollouts, aggregation
):
    rollouts = random_rollouts(11)
    module = module_of(
        tiny_model, aggregation=aggregation, advantage=GRPO(False), max_tokens_per_micro_batch=30
    )
    train_on(module, [pack_rollouts(rollouts)])
    # The same from its definition: one plain forward per rollout, Python arithmetic for the rest.
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = sum(sum(r.loss_mask) for r in rollouts)
    loss = torch.zeros(())
    for rollout in rollouts:
        peers = [r.reward for r in rollouts if r.group_id == rollout.group_id]
        advantage = rollout.reward - sum(peers) / len(peers)
        ids = torch.tensor(rollout.prompt.token_ids + rollout.token_ids)
        start, mask = len(rollout.prompt.token_ids), torch.tensor(rollout.loss_mask)
        logits = plain(input_ids=ids[None]).logits[0, start - 1 : -1] / rollout.sampling.temperature
        logprobs = logits.log_softmax(-1).gather(-1, ids[start:, None]).squeeze(-1)[mask]
        per_rollout = len(rollouts) * len(logprobs)
        loss -= (
            advantage
            * logprobs.sum()
            / (tokens if isinstance(aggregation, TokenMean) else per_rollout)
        )
    loss.backward()
    expected = {f"lm.{name}": p.grad for name, p in plain.named_parameters()}
    assert_close(last_gradients(module), expected, gradient_rounding(tiny_model, tokens))


@pytest.mark.parametrize("make", [module_of, with_critic])
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(
    tiny_model, train_on, random_batch, make
):
    gradients = []
    for budget in (100_000, 60, 25, 1):
        module = make(tiny_model, max_tokens_per_micro_batch=budget)
        train_on(module, [random_batch(12, groups=5)])
        gradients.append(last_gradients(module))
    for other in gradients[1:]:
        assert_close(other, gradients[0], gradient_rounding(tiny_model, tokens=100))


@pytest.mark.parametrize("make", [module_of, with_critic])
def test_the_gradient_does_not_depend_on_the_order_of_rollouts(
    tiny_model, train_on, random_rollouts, make
):
    rollouts = random_rollouts(13, groups=5)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(1)).tolist()
    gradients = []
    for arranged in (rollouts, [rollouts[i] for i in order]):
        module = make(tiny_model, max_tokens_per_micro_batch=60)
        train_on(module, [pack_rollouts(arranged)])
        gradients.append(last_gradients(module))
    assert_close(gradients[1], gradients[0], gradient_rounding(tiny_model, tokens=100))


def test_several_epochs_and_minibatches_do_not_depend_on_micro_batches_either(
    tiny_model, train_on, random_batch
):
    weights = []
    for budget in (100_000, 20):
        module = with_critic(
            tiny_model,
            max_tokens_per_micro_batch=budget,
            ppo_epochs=2,
            minibatches=2,
            max_grad_norm=1.0,
        )
        train_on(module, [random_batch(14)])
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert distance(weights[0], weights[1]) < gradient_rounding(tiny_model, tokens=100)


class StepByStep(Learner):
    """The named steps, called one by one."""

    def step(self, batch, decide=None):
        batch = self.compute_old_logprobs(batch)
        batch = self.compute_values(batch)
        batch = self.compute_ref_logprobs(batch)
        batch = self.compute_advantages(batch)
        metrics = self.update(batch)
        self.end_iteration(metrics)
        return metrics


def ppo(tiny_model, **options) -> PolicyModule:
    """Make PPO with two passes, a critic of its own and a KL penalty."""
    return PolicyModule(
        str(tiny_model),
        advantage=GAE(),
        critic=SeparateValueHead(),
        kl=K3Penalty(0.1),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        **grouped(ppo_epochs=2, minibatches=2, max_tokens_per_micro_batch=50, **options),
    )


def test_a_learner_of_ones_own_calls_the_named_steps(tiny_model, train_on, random_batch):
    states = []
    for kind in (Learner, StepByStep):
        module = ppo(tiny_model, learner=kind)
        train_on(module, [random_batch(15), random_batch(16)])
        assert type(module.learner) is kind
        states.append(module.state_dict())
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


def test_a_learner_needs_no_lightning(tiny_model, train_on, random_batch):
    batches = [random_batch(15), random_batch(16)]
    module = ppo(tiny_model)
    train_on(module, [batch.clone() for batch in batches])
    policy, reference = Policy(str(tiny_model), SeparateValueHead()), FrozenReference()
    reference.configure(policy)
    optimizer = torch.optim.AdamW(policy.parameter_groups(None), lr=1e-3)
    learner = Learner(
        policy,
        TorchBackend(optimizer),
        GAE(),
        Objective(kl=K3Penalty(0.1), value_loss=ValueLoss()),
        settings=UpdateSettings(ppo_epochs=2, minibatches=2, max_tokens_per_micro_batch=50),
        reference=reference,
    )
    for batch in batches:
        learner.step(batch)
    assert learner.iteration == module.iteration == 2
    for (name, own), other in zip(
        policy.named_parameters(), module.policy.parameters(), strict=True
    ):
        assert torch.equal(own, other), name


def test_a_learner_imports_no_lightning():
    code = """import sys, lightning_rl.learn.learner
print(sorted({name.split(".")[0] for name in sys.modules} & {"lightning", "pytorch_lightning"}))"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_penalty_without_a_reference_is_refused(tiny_model):
    policy = Policy(str(tiny_model))
    backend = TorchBackend(sgd(policy.parameters()))
    with pytest.raises(ConfigError, match="needs a reference; pass one"):
        Learner(policy, backend, objective=Objective(kl=K3Penalty()))


def test_old_logprobs_are_those_before_the_update(tiny_model, random_batch):
    module = module_of(tiny_model, max_tokens_per_micro_batch=40)
    module.configure_model()
    batch = module.learner.compute_old_logprobs(random_batch(17))
    with torch.no_grad():
        scores = module.policy(batch)
    mask = batch["tokens", "loss_mask"]
    bound = scores_rounding(tiny_model, scores.logprobs)
    torch.testing.assert_close(
        batch["tokens", "old_logprobs"][mask], scores.logprobs, rtol=0, atol=bound
    )
    assert not batch["tokens", "old_logprobs"][~mask].any()


def test_steps_that_need_what_is_not_there_are_refused(tiny_model, random_batch):
    module = module_of(tiny_model)
    with pytest.raises(ConfigError, match=r"call configure_model\(\) first"):
        module.learner.compute_old_logprobs(random_batch(0))
    module.configure_model()
    with pytest.raises(ConfigError, match="needs a reference; set kl"):
        module.learner.compute_ref_logprobs(random_batch(0))
    with pytest.raises(ConfigError, match=r"needs a critic; set critic\.head"):
        module.learner.compute_values(random_batch(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ppo_epochs": 0}, "ppo_epochs=0 must be >= 1"),
        ({"minibatches": -1}, "minibatches=-1 must be >= 1"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch=0 must be >= 1"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0 must be > 0"),
        ({"advantage": GAE()}, "advantage=GAE needs a critic; set critic.head"),
        ({"learner": "torch.nn.Linear"}, "expected the import path of a subclass of Learner, got"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PolicyModule("model", **grouped(**options))


def test_the_reference_stays_where_the_policy_started(tiny_model, train_on, random_batch):
    recorder = Rows()
    module = module_of(tiny_model, kl=K3Penalty(0.1))
    train_on(module, [random_batch(s) for s in (1, 2, 3)], callbacks=[recorder])
    kl = [row["policy/kl_ref"] for row in recorder.rows]
    assert kl[0] == 0
    assert min(kl[1:]) > 0
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    for name, weight in module.reference.policy.lm.state_dict().items():
        assert torch.equal(weight, start[name]), name
    assert not any(p.requires_grad for p in module.reference.parameters())


def test_the_reference_of_a_random_start_is_that_start(tiny_model):
    module = module_of(tiny_model, kl=K3Penalty(), random_init=True)
    module.configure_model()
    for mine, theirs in zip(
        module.policy.lm.parameters(), module.reference.policy.lm.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_clipping_bounds_the_step_and_reports_the_norm_before(tiny_model, train_on, random_batch):
    start = {
        n: p.clone() for n, p in AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters()
    }
    recorder = Rows()
    module = module_of(tiny_model, max_grad_norm=0.01)
    train_on(module, [random_batch(18)], callbacks=[recorder])
    moved = torch.cat([(p - start[n]).flatten() for n, p in module.policy.lm.named_parameters()])
    # SGD with learning rate 0.1 on a gradient of norm 0.01
    assert float(moved.detach().norm()) == pytest.approx(1e-3, rel=1e-3)
    assert recorder.rows[0]["policy/grad_norm"] > 0.1


def test_metrics_of_a_uniform_policy_by_hand(tiny_model, train_on, make_rollout):
    recorder = Rows()
    module = module_of(tiny_model)
    module.configure_model()
    torch.nn.init.zeros_(module.policy.lm.get_output_embeddings().weight)
    rollouts = [
        make_rollout([3], [4, 1], reward=1.0, logprobs=[-math.log(16), -3.0]),
        make_rollout([3], [5, 1], reward=0.0, logprobs=[-math.log(16), -math.log(16)]),
    ]
    train_on(module, [pack_rollouts(rollouts)], callbacks=[recorder])
    row = recorder.rows[0]
    # All 16 tokens equally likely: entropy ln 16. The engine claimed -3 for one token of four.
    gap = 3 - math.log(16)
    assert row["policy/entropy"] == pytest.approx(math.log(16), rel=1e-6)
    assert row["rollout/logprob_gap_max"] == pytest.approx(gap, rel=1e-5)
    assert row["rollout/logprob_gap_mean"] == pytest.approx(gap / 4, rel=1e-5)
    assert row["policy/clip_frac"] == 0
    assert row["policy/loss"] == pytest.approx(0, abs=1e-6)  # advantages of a group cancel
    assert row["policy/lr"] == pytest.approx(0.1)


def test_the_schedule_steps_once_per_optimizer_step(tiny_model, train_on, random_batch):
    recorder = Rows()
    module = module_of(
        tiny_model,
        minibatches=2,
        lr_scheduler=lambda o: WarmupLinear(o, total_steps=8, warmup_steps=0),
    )
    trainer = train_on(module, [random_batch(s) for s in (1, 2)], callbacks=[recorder])
    assert trainer.global_step == 4
    # Steps at 8/8 and 7/8, then 6/8 and 5/8 of 0.1
    lr = [row["policy/lr"] for row in recorder.rows]
    assert lr == pytest.approx([0.1 * 7.5 / 8, 0.1 * 5.5 / 8])


def test_the_critic_has_a_learning_rate_of_its_own(tiny_model, train_on, random_batch):
    module = module_of(tiny_model, advantage=GAE(), critic=Critic(SeparateValueHead(), lr=0.7))
    trainer = train_on(module, [random_batch(19)])
    policy_group, critic_group = trainer.optimizers[0].param_groups
    assert (policy_group["lr"], critic_group["lr"]) == (0.1, 0.7)
    heads = sum(p.numel() for p in module.policy.value_head.parameters())
    assert sum(p.numel() for p in critic_group["params"]) == heads


@pytest.mark.parametrize(("lr", "critic"), [(1e-6, 1e-5), (1e-3, 1e-3), (0.0, 0.0)])
def test_the_critic_does_not_creep_as_the_policy_does(tiny_model, train_on, random_batch, lr,
                                                      critic):  # fmt: skip
    module = with_critic(tiny_model, optimizer=lambda p: torch.optim.SGD(p, lr=lr),
                         lr_scheduler=lambda o: WarmupLinear(o, total_steps=4))  # fmt: skip
    trainer = train_on(module, [random_batch(19)])
    # The schedule starts from there: after one step of four, both are at three quarters.
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert rates == pytest.approx([0.75 * lr, 0.75 * critic])


def test_iterations_are_counted(tiny_model, train_on, random_batch):
    module = module_of(tiny_model, minibatches=2)
    train_on(module, [random_batch(s) for s in (1, 2, 3)])
    assert module.iteration == 3


def test_a_fused_optimizer_from_yaml_steps_as_the_plain_one(tiny_model, train_on, random_batch):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(PolicyModule, "model")
    weights = []
    for fused in (True, False):
        text = f"""
        model:
          model: {tiny_model}
          optimizer:
            class_path: torch.optim.AdamW
            init_args: {{lr: 0.01, eps: 1.0e-4, fused: {fused}}}
        """
        module = parser.instantiate_classes(parser.parse_string(text)).model
        trainer = train_on(module, [random_batch(20), random_batch(21)])
        assert trainer.optimizers[0].defaults["fused"] is fused
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert distance(weights[0], weights[1]) < gradient_rounding(tiny_model, tokens=100)
