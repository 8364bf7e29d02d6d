"""Test runs of a mixture of experts: collected, pushed, replayed and trained."""

import logging

import pytest
import torch

from lightning_rl import MultiTurn, Sampling
from lightning_rl.agents.base import Environment, Reply
from lightning_rl.callbacks import DeadExpertGuard, ExpertOverloadGuard, WeightSync
from lightning_rl.data.routing import of_text
from lightning_rl.extend import LoadBalance, OldRouting, RolloutRouting
from lightning_rl.models.lora import LoRA
from lightning_rl.rewards.rules import EnvironmentReward
from tests.support.mixtures import saved_mixture
from tests.support.small_run import Rows, data_module, grpo, trainer_of


class Seen(Rows):
    """Records rows of metrics, and all rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts = []

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        self.rollouts += rollouts


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return saved_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def run(mixture, where, *callbacks, precision="32-true", data=None, **options) -> Seen:
    """Run two iterations of two updates each."""
    seen = Seen()
    trainer = trainer_of(where, [WeightSync(), *callbacks, seen], precision=precision)
    settings = {"iterations_per_epoch": 2, "evaluation": None} | (data or {})
    trainer.fit(grpo(mixture, minibatches=2, **options), data_module(**settings))
    return seen


@pytest.mark.parametrize("replay", [None, RolloutRouting(), OldRouting()])
@pytest.mark.parametrize("options", [{}, {"lora": LoRA(rank=4)}, {"gradient_checkpointing": True}])
def test_in_float32_engine_and_trainer_agree(mixture, tmp_path, replay, options):
    seen = run(mixture, tmp_path, routing_replay=replay, balance=LoadBalance(0.01), **options)
    for row in seen.rows[1:]:
        assert row["rollout/logprob_gap_mean"] < 1e-4
        assert row["policy/grad_norm"] > 0
        assert 0 < row["experts/load_entropy"] < 1
        assert row["experts/balance_loss"] >= 1
    texts = {rollout.rows[0].routed_experts != "" for rollout in seen.rollouts}
    assert texts == {isinstance(replay, RolloutRouting)}


def test_in_bfloat16_a_replay_halves_the_gap(mixture, tmp_path):
    """Only the first batch is the same in both: the second is another policy's."""
    gaps = []
    for replay in (None, RolloutRouting()):
        seen = run(mixture, tmp_path, precision="bf16-mixed", routing_replay=replay)
        gaps.append(seen.rows[1]["rollout/logprob_gap_max"])
    assert gaps[1] < gaps[0] / 2
    assert seen.rows[1]["experts/replayed_otherwise"] > 0


class Echo(Environment):
    """Answers each turn with a digit."""

    def __init__(self, prompt) -> None: ...

    def step(self, turn: str) -> Reply:
        return Reply("7=", reward=turn.count("7"))


def test_tokens_that_an_environment_gives_are_replayed_too(mixture, tmp_path):
    data = {
        "agent": MultiTurn(Echo, max_turns=3, max_turn_tokens=2),
        "rewards": [EnvironmentReward()],
        "sampling": Sampling(max_tokens=12),
    }
    seen = run(mixture, tmp_path, routing_replay=RolloutRouting(), data=data)
    given = 0
    for rollout in seen.rollouts:
        [row] = rollout.rows
        read = row.length - 1 if row.loss_mask[-1] else row.length - 3  # less the last "7="
        assert len(of_text(row.routed_experts)) >= read
        given += row.loss_mask.count(False)
    assert given > 10
    assert seen.rows[1]["rollout/logprob_gap_max"] < 1e-3


def test_guards_tell_of_dead_and_overloaded_experts(mixture, tmp_path, caplog):
    guards = [
        DeadExpertGuard(bound=-1.0, patience=1),
        ExpertOverloadGuard(bound=1.0, patience=1),
        ExpertOverloadGuard(bound=8.0, patience=1),  # more there cannot be: eight experts
    ]
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        seen = run(mixture, tmp_path, *guards)
    row = seen.rows[1]
    assert row["guard/dead_experts_value"] == row["experts/dead_share"]
    assert row["guard/dead_experts"] == 1
    told = [record.getMessage() for record in caplog.records if "Guard" in record.getMessage()]
    assert any(m.startswith("DeadExpertGuard") and "share of experts" in m for m in told)
    assert sum(m.startswith("ExpertOverloadGuard") for m in told) == 1


def test_balance_makes_the_load_more_even(mixture, tmp_path):
    """The coefficient outweighs the reward."""
    entropies = []
    for coef in (0.0, 10.0):
        data = {"iterations_per_epoch": 6}
        seen = run(mixture, tmp_path, balance=LoadBalance(coef), data=data)
        entropies.append(seen.rows[-1]["experts/load_entropy"])
    assert entropies[1] > entropies[0]
    assert torch.tensor(entropies).isfinite().all()
