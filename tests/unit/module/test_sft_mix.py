"""Test SFTMix: sampled tokens learn by reward, expert tokens by imitation, in one batch."""

import math

import pytest
import torch
from tensordict import TensorDict

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.algos.correction import TokenTIS
from lightning_rl.algos.kl import EntropyBonus, K2Penalty
from lightning_rl.algos.losses import PPOClip, SFTMix
from lightning_rl.algos.objective import Objective
from lightning_rl.callbacks import WeightSync
from lightning_rl.collect.demonstrations import DemonstrationRows
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.policy import Scores
from lightning_rl.module import PolicyModule
from tests.support.small_run import numbers, trainer_of


def test_loss_and_gradient_by_hand():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.double, requires_grad=True)
    tokens = TensorDict(
        {
            "old_logprobs": torch.tensor([-1.0, -9.0, -0.5], dtype=torch.double),
            "advantages": torch.tensor([2.0, 0.0, -1.0], dtype=torch.double),
            "demonstration": torch.tensor([False, True, False]),
        },
        batch_size=[3],
    )
    loss, metrics = SFTMix(coef=0.25)(logprobs, tokens)
    loss.sum().backward()
    # ratio 1: -A for sampled tokens; 0.25 x 2 nats for the expert's
    assert loss.tolist() == pytest.approx([-2.0, 0.5, 1.0])
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -0.25, 1.0])
    assert metrics["demonstration_nll"].tolist() == [2.0]
    assert len(metrics["clip_frac"]) == 2  # of sampled tokens only


def every_second(completions):
    return [float(place % 2) for place in range(len(completions))]


def fit(tiny_model, tmp_path, advantage=GRPO(), loss=None, critic=None):
    module = PolicyModule(
        str(tiny_model),
        advantage=advantage,
        loss=loss or SFTMix(coef=1.0),
        critic=critic,
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
    )
    rows = []

    class Watch(WeightSync):
        def on_iteration_end(self, trainer, pl_module, metrics):
            rows.append(metrics)

    data = RLDataModule(
        numbers(20),
        [every_second],
        TransformersEngine(),
        demonstrations=DemonstrationRows(
            [{"prompt": f"{n}=", "completion": "777"} for n in range(20)], per_iteration=4
        ),
        sampling=Sampling(max_tokens=4),
        groups_per_iteration=2,
        group_size=2,
        iterations_per_epoch=8,
    )
    trainer_of(tmp_path, [Watch()], logger=False).fit(module, datamodule=data)
    return [row for row in rows if "policy/demonstration_nll" in row]


def test_experts_are_learnt_from_and_kept_out_of_what_is_measured(tiny_model, tmp_path):
    rows = fit(tiny_model, tmp_path)
    assert len(rows) == 8
    assert rows[-1]["policy/demonstration_nll"] < 0.5 * rows[0]["policy/demonstration_nll"]
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(row["reward/mean"] == 0.5 and row["rollout/completed"] == 4 for row in rows)


@pytest.mark.parametrize(
    "options", [{"loss": PPOClip()}, {"advantage": GAE(), "critic": SharedValueHead()}]
)
def test_experts_need_the_loss_and_a_group_advantage(tiny_model, tmp_path, options):
    with pytest.raises(ConfigError, match="demonstrations adds rows without a reward; set"):
        fit(tiny_model, tmp_path, **options)


def test_correction_kl_and_entropy_leave_experts_alone():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.double, requires_grad=True)
    entropy = torch.tensor([0.5, 0.5], dtype=torch.double)
    tokens = TensorDict(
        {
            "old_logprobs": logprobs.detach(),
            "rollout_logprobs": torch.tensor([-1.0, 0.0], dtype=torch.double) - math.log(4.0),
            "ref_logprobs": torch.tensor([-1.0, -5.0], dtype=torch.double),
            "advantages": torch.tensor([1.0, 0.0], dtype=torch.double),
            "row": torch.tensor([0, 1]),
            "demonstration": torch.tensor([False, True]),
        },
        batch_size=[2],
    )
    objective = Objective(SFTMix(coef=0.25), TokenTIS(cap=2.0), K2Penalty(0.1), EntropyBonus(0.01))
    scores = Scores(torch.arange(2), logprobs, entropy, None)
    loss, metrics = objective(scores, tokens, iteration=0)
    # sampled: weight min(4, 2) times -A, minus the bonus; expert: 0.25 x 2 nats and nothing else
    assert loss.tolist() == pytest.approx([-2.0 - 0.005, 0.5])
    assert metrics["policy/kl_ref"].tolist() == [0.0]
