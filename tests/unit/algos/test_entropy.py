"""Test entropy bonuses: the schedule by hand, the gradient and what a step does."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rl.algos.kl import EntropyBonus
from lightning_rl.algos.schedules import AdaptiveEntropy, LinearSchedule
from lightning_rl.module import PolicyModule
from tests.support.tolerances import gradient_rounding


def test_the_linear_schedule():
    bonus = EntropyBonus(LinearSchedule(start=0.1, final=0.02, iterations=4))
    assert [bonus.at(i) for i in (0, 1, 2, 3, 4, 5, 100)] == pytest.approx(
        [0.1, 0.08, 0.06, 0.04, 0.02, 0.02, 0.02]
    )
    assert [EntropyBonus(0.3).at(i) for i in (0, 7)] == [0.3, 0.3]


def test_a_configuration_names_a_schedule_as_it_names_a_class():
    given = {"start": 0.3, "final": 0.1, "iterations": 10}
    for name in ("LinearSchedule", "lightning_rl.extend.LinearSchedule"):
        schedule = {"class_path": name, "init_args": given}
        bonus = {"class_path": "EntropyBonus", "init_args": {"coef": schedule}}
        for entropy in (bonus, {"coef": schedule}):
            module = PolicyModule("model", entropy=entropy)
            assert module.objective.entropy.at(5) == pytest.approx(0.2)
    assert PolicyModule("model", entropy={"coef": 0.3}).objective.entropy == EntropyBonus(0.3)


def without_advantages(random_batch, seed: int):
    batch = random_batch(seed)
    batch["rollouts", "reward"] = torch.zeros(len(batch["rollouts"]))
    return batch


def module_of(tiny_model, entropy, lr: float) -> PolicyModule:
    module = PolicyModule(
        str(tiny_model), entropy=entropy,
        update={"max_grad_norm": None, "max_tokens_per_micro_batch": 25},
        optimizer=lambda p: torch.optim.SGD(p, lr=lr),
    )  # fmt: skip
    module.configure_model()
    return module


def entropy_of(module, batch):
    return module.policy(batch).entropy.mean()


@pytest.mark.parametrize("coef", [0.5, -0.5])
def test_the_gradient_is_minus_coef_times_that_of_the_mean_entropy(
    tiny_model, train_on, random_batch, coef
):
    batch = without_advantages(random_batch, 51)
    module = module_of(tiny_model, EntropyBonus(coef), lr=0.01)
    parameters = list(module.policy.lm.parameters())
    before = entropy_of(module, batch)
    expected = torch.autograd.grad(-coef * before, parameters)
    train_on(module, [batch])
    gap = sum(float((p.grad - g).norm() ** 2) for p, g in zip(parameters, expected, strict=True))
    size = sum(float(g.norm() ** 2) for g in expected)
    assert (gap / size) ** 0.5 < gradient_rounding(tiny_model, len(batch["tokens"]))
    # A step along it: more entropy with a bonus, less with a malus.
    after = entropy_of(module, batch)
    assert float((after - before).detach()) * coef > 0
    logged = float(module.trainer.callback_metrics["policy/entropy"])
    assert logged == pytest.approx(float(before.detach()), rel=1e-5)


class Norms(Callback):
    """The gradient's norm in every iteration."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.values.append(float(trainer.callback_metrics["policy/grad_norm"]))


def test_the_schedule_counts_iterations(tiny_model, train_on, random_batch):
    """Nothing moves at lr 0, so the gradient of iteration i is at(i) times the same one."""
    norms = Norms()
    module = module_of(tiny_model, EntropyBonus(LinearSchedule(0.4, 0.1, iterations=3)), lr=0.0)
    train_on(module, [without_advantages(random_batch, 52)] * 4, callbacks=[norms])
    assert [n / norms.values[0] for n in norms.values] == pytest.approx([1, 0.75, 0.5, 0.25])


def test_an_adaptive_bonus_follows_each_iteration_and_survives_a_checkpoint(
    tiny_model, random_batch, train_on, tmp_path
):
    """The entropy of a new model, ln 13 = 2.6 nats at most, is below the target."""

    def module():
        return module_of(tiny_model, EntropyBonus(AdaptiveEntropy(target=9.0, step=0.1)), lr=0.01)

    first = module()
    trainer = train_on(first, [random_batch(1), random_batch(2)])
    assert first.objective.entropy.at(2) == pytest.approx(0.2)
    assert float(trainer.callback_metrics["policy/entropy_coef"]) == pytest.approx(0.1)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = module()
    train_on(resumed, [random_batch(3)], tmp_path / "two.ckpt", max_epochs=2)
    assert resumed.objective.entropy.at(3) == pytest.approx(0.3)
    assert float(resumed.trainer.callback_metrics["policy/entropy_coef"]) == pytest.approx(0.2)
