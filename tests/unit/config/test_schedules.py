"""Numbers that change over iterations: each by hand, what is refused, and where they are named."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rl import EntropyBonus, K2Penalty, PolicyModule
from lightning_rl.envs import ActorCriticModule, QAgent
from lightning_rl.errors import ConfigError
from lightning_rl.extend import (
    AdaptiveCoefficient,
    AdaptiveEntropy,
    AdaptiveKL,
    ConstantSchedule,
    ExponentialSchedule,
    LinearSchedule,
)
from lightning_rl.games import ExpertIteration


def test_each_by_hand():
    assert [ConstantSchedule(0.3).at(t) for t in (0, 9)] == [0.3, 0.3]
    assert [LinearSchedule(0.8, 0.0, 4).at(t) for t in range(6)] == pytest.approx(
        [0.8, 0.6, 0.4, 0.2, 0, 0]
    )
    assert [LinearSchedule(1.0, 0.2, 4).at(t) for t in (0, 1, 4, 9)] == pytest.approx(
        [1.0, 0.8, 0.2, 0.2]
    )
    assert [ExponentialSchedule(1.0, 0.5).at(t) for t in range(3)] == [1, 0.5, 0.25]


def test_what_a_number_depends_on_is_in_a_checkpoint_and_nothing_else():
    assert LinearSchedule(1.0, 0.0, 4).state_dict() == {}
    assert ConstantSchedule(0.3).state_dict() == {"value": 0.3}
    held = AdaptiveKL(1.0, target=0.1)
    held.update(0.2)
    other = AdaptiveCoefficient(5.0)
    other.load_state_dict(held.state_dict())
    assert other.at(7) == 2.0
    other.load_state_dict(LinearSchedule(1.0, 0.0, 4).state_dict())  # it was another schedule
    assert other.at(7) == 2.0


def test_a_bonus_for_low_entropy_by_hand():
    """The bonus moves after each measurement, as in TRL, and acts only after one that was low."""
    coef = AdaptiveEntropy(value=0.01, target=0.5, step=0.25, low=0.0, high=0.5)
    found = [coef.at(0)]
    for entropy in (0.5, 0.4, 0.6, math.nan, 0.1, 0.2, 2.0, 3.0, 0.5):
        coef.update(entropy)
        found.append(coef.at(0))
    # The value itself: 0.26, 0.5 (the highest), 0.25, 0.25, 0.5, 0.5, 0.25, 0, 0.25
    assert found == pytest.approx([0, 0.26, 0.5, 0, 0, 0.5, 0.5, 0, 0, 0.25])
    other = AdaptiveEntropy(target=0.5, step=0.25)
    other.load_state_dict(coef.state_dict())
    assert other.at(0) == 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QAgent(epsilon=LinearSchedule(1, 1.5, 4)), r"epsilon=1\.5 must be in \[0, 1\]"),
        (lambda: QAgent(epsilon=-0.1), r"epsilon=-0\.1 must be in \[0, 1\]"),
        (lambda: ExpertIteration(truth_share=1.5), r"truth_share=1\.5 must be in \[0, 1\]"),
        (lambda: ExpertIteration(truth_share=math.nan), "truth_share=nan must be finite"),
        (lambda: ActorCriticModule(kl=-1.0), r"kl=-1\.0 must be >= 0"),
        (lambda: K2Penalty(LinearSchedule(0.0, 1.0, 4)), r"kl coef=0\.0 must be > 0"),
        (lambda: K2Penalty(LinearSchedule(1.0, -1.0, 4)), r"kl coef=-1\.0 must be > 0"),
        (lambda: LinearSchedule(1.0, 0.0, 0), "iterations=0 must be >= 1"),
        (lambda: ExponentialSchedule(1.0, 1.5), r"decay=1\.5\) must be in \[0, 1\]"),
        (lambda: EntropyBonus(AdaptiveCoefficient()), "measured KL, but .* measures entropy"),
        (lambda: K2Penalty(AdaptiveEntropy()), "measured entropy, but kl coef measures KL"),
        (lambda: AdaptiveEntropy(target=0.0), "target=0.0, .*: target and step must be > 0"),
        (lambda: AdaptiveEntropy(low=0.5, high=0.1), "low=0.5, high=0.1.*low <= high"),
        (lambda: QAgent(epsilon=AdaptiveKL(0.5)), "epsilon=AdaptiveKL: it adapts"),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_where_they_are_set(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_configuration_names_the_same_class_in_every_place():
    given = {"start": 0.8, "final": 0.4, "iterations": 2}
    schedule = {"class_path": "LinearSchedule", "init_args": given}
    penalty = {"class_path": "K3Penalty", "init_args": {"coef": schedule}}
    module = PolicyModule("model", kl=penalty, kl_reward=penalty, entropy={"coef": schedule})
    found = [
        module.objective.kl.coef,
        module.kl_reward.coef,
        module.objective.entropy,
        ActorCriticModule(kl=schedule).kl,
        QAgent(epsilon=schedule).epsilon,
        ExpertIteration(truth_share=schedule).truth_share,
    ]
    assert [one.at(1) for one in found] == pytest.approx([0.6] * len(found))


class Rows(Callback):
    """Metrics of every iteration."""

    def __init__(self) -> None:
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.rows.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def test_a_penalty_fades_as_iterations_are_counted(tiny_model, train_on, random_batch):
    """A penalty of 0 weighs nothing: the reward has no KL taken off, and the metric is left out."""
    rows = Rows()
    module = PolicyModule(
        str(tiny_model),
        kl_reward=K2Penalty(LinearSchedule(0.4, 0.0, iterations=2)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    train_on(module, [random_batch(seed) for seed in (1, 2, 3)], callbacks=[rows])
    assert [row["reward/kl_coef"] for row in rows.rows[:2]] == pytest.approx([0.4, 0.2])
    assert all(math.isfinite(value) for row in rows.rows for value in row.values())
