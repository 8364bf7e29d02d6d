"""Off-policy correction: weights by hand and in float64, metrics, and what they do to the loss."""

import math
import warnings

import pytest
import torch
from tensordict import TensorDict

from lightning_rl.algos.correction import (
    GeometricMIS,
    GeometricTIS,
    SequenceMIS,
    SequenceTIS,
    TokenMIS,
    TokenTIS,
)
from lightning_rl.algos.kl import K2Penalty
from lightning_rl.algos.losses import PPOClip
from lightning_rl.algos.objective import Objective
from lightning_rl.callbacks import WeightSync
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.partial import PartialCollector
from lightning_rl.collect.prefetch import AsyncCollector, OneStepOffCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import Scores
from lightning_rl.module import PolicyModule
from tests.support.small_run import data_module, grpo, trainer_of


def tokens_of(ratios, row, old=-2.0) -> TensorDict:
    """Make tokens whose importance weights (old policy over engine) are ``ratios``, in float64."""
    old_logprobs = torch.full((len(ratios),), old, dtype=torch.double)
    engine = old_logprobs - torch.tensor(ratios, dtype=torch.double).log()
    return TensorDict(
        {
            "old_logprobs": old_logprobs,
            "rollout_logprobs": engine,
            "row": torch.tensor(row),
            "demonstration": torch.zeros(len(row), dtype=torch.bool),
        },
        batch_size=[len(ratios)],
    )


TOKENS = tokens_of([0.25, 1.0, 3.0, 16.0, 1.0, 0.25, 0.25, 0.25], [0, 0, 0, 1, 1, 2, 2, 2])
# Products: 0.75, 16 and 1/64; geometric means: 0.75^(1/3) = 0.9086, 4 and 0.25
MEAN = 0.75 ** (1 / 3)


@pytest.mark.parametrize(
    ("correction", "weights", "changed"),
    [
        (TokenTIS(cap=2.0), [0.25, 1, 2, 2, 1, 0.25, 0.25, 0.25], [0, 0, 1, 1, 0, 0, 0, 0]),
        (TokenMIS(0.5, 5.0), [0, 1, 3, 0, 1, 0, 0, 0], [1, 0, 0, 1, 0, 1, 1, 1]),
        (TokenMIS(0.0, 5.0), [0.25, 1, 3, 0, 1, 0.25, 0.25, 0.25], [0, 0, 0, 1, 0, 0, 0, 0]),
        (SequenceTIS(cap=2.0), [0.75] * 3 + [2] * 2 + [1 / 64] * 3, [0] * 3 + [1] * 2 + [0] * 3),
        (SequenceMIS(0.5, 5.0), [0.75] * 3 + [0] * 5, [0] * 3 + [1] * 5),
        (SequenceMIS(), [0.75] * 3 + [0] * 2 + [1 / 64] * 3, [0] * 3 + [1] * 2 + [0] * 3),
        (GeometricTIS(cap=2.0), [MEAN] * 3 + [2] * 2 + [0.25] * 3, [0] * 3 + [1] * 2 + [0] * 3),
        (GeometricMIS(0.5, 5.0), [MEAN] * 3 + [4] * 2 + [0] * 3, [0] * 5 + [1] * 3),
    ],
)  # fmt: skip
def test_weights_by_hand(correction, weights, changed):
    ours, metrics = correction(TOKENS)
    assert ours.tolist() == pytest.approx(weights, abs=1e-12)
    assert metrics["corrected_share"].tolist() == changed
    assert metrics["weight_mean"].tolist() == pytest.approx(weights, abs=1e-12)
    if isinstance(correction, SequenceTIS | SequenceMIS):
        raw = [0.75] * 3 + [16] * 2 + [1 / 64] * 3
    elif isinstance(correction, GeometricTIS | GeometricMIS):
        raw = [MEAN] * 3 + [4] * 2 + [0.25] * 3
    else:
        raw = [0.25, 1, 3, 16, 1, 0.25, 0.25, 0.25]
    assert metrics["weight_max"].tolist() == pytest.approx(raw)


@pytest.mark.parametrize(
    ("correction", "power"),
    [
        (TokenTIS(), None), (SequenceTIS(), 0), (GeometricTIS(), 1),
        (TokenMIS(), None), (SequenceMIS(), 0), (GeometricMIS(0.5, 2.0), 1),
    ],
)  # fmt: skip
def test_weights_in_float64(correction, power):
    generator = torch.Generator().manual_seed(1)
    row = torch.repeat_interleave(torch.arange(20), torch.randint(1, 6, (20,), generator=generator))
    row = row[torch.randperm(len(row), generator=generator)]  # also where rows are not contiguous
    ratios = torch.randn(len(row), generator=generator, dtype=torch.double).mul(1.5).exp().tolist()
    expected = []
    for i in range(len(row)):
        own = [ratios[j] for j in range(len(row)) if row[j] == row[i]]
        w = ratios[i] if power is None else math.prod(own) ** (1 / len(own) ** power)
        if isinstance(correction, TokenTIS):
            expected.append(min(w, correction.cap))
        else:
            expected.append(w if correction.low <= w <= correction.high else 0.0)
    ours, metrics = correction(tokens_of(ratios, row.tolist()))
    assert ours.tolist() == pytest.approx(expected, rel=1e-12)
    assert 0 < metrics["corrected_share"].mean() < 1


def test_a_drift_of_a_nat_in_ten_tokens_is_seen_by_every_sequence_level_default():
    """0.2 nats per token: w = 1.22 each, 7.4 for the rollout; token bounds see nothing of it."""
    tokens = tokens_of([math.exp(0.2)] * 10, [0] * 10)
    assert TokenTIS()(tokens)[1]["corrected_share"].sum() == 0
    assert TokenMIS()(tokens)[1]["corrected_share"].sum() == 0
    assert SequenceTIS()(tokens)[0].tolist() == [2.0] * 10
    assert GeometricTIS()(tokens)[0].tolist() == [1.001] * 10
    assert SequenceMIS()(tokens)[0].tolist() == GeometricMIS()(tokens)[0].tolist() == [0.0] * 10


@pytest.mark.parametrize(
    "correction",
    [TokenTIS(), SequenceTIS(), GeometricTIS(2.0), TokenMIS(), SequenceMIS(), GeometricMIS()],
)
def test_an_absurd_weight_is_corrected_and_stays_finite(correction):
    tokens = TensorDict(
        {
            "old_logprobs": torch.tensor([-1.0]),
            "rollout_logprobs": torch.tensor([-200.0]),
            "row": torch.tensor([0]),
            "demonstration": torch.tensor([False]),
        },
        batch_size=[1],
    )
    weights, metrics = correction(tokens)
    assert weights.tolist() in ([2.0], [0.0])
    assert metrics["corrected_share"].tolist() == [1.0]
    assert all(bool(m.isfinite().all()) for m in metrics.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenTIS(cap=0.9), r"TokenTIS\(cap=0.9\) must be >= 1"),
        (lambda: SequenceTIS(cap=0.0), r"SequenceTIS\(cap=0.0\) must be >= 1"),
        (lambda: TokenMIS(low=1.0), "need 0 <= low < 1 < high"),
        (lambda: SequenceMIS(high=1.0), r"SequenceMIS\(low=0.0, high=1.0\)"),
        (lambda: GeometricMIS(low=1.0), r"GeometricMIS\(low=1.0, high=1.001\)"),
    ],
)
def test_impossible_bounds_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("collector", "model", "warns"),
    [
        (AsyncCollector(max_staleness=1), {}, True),
        (OneStepOffCollector(), {}, True),
        (PartialCollector(), {}, True),
        (AsyncCollector(max_staleness=1), {"correction": TokenTIS()}, False),
        (AsyncCollector(max_staleness=1), {"use_rollout_logprobs": True}, False),
        (AsyncCollector(max_staleness=0), {}, False),
        (SyncCollector(), {}, False),
    ],
)
def test_stale_rollouts_that_nothing_corrects_for_are_warned_of(
    tiny_model, tmp_path, collector, model, warns
):
    module, data = grpo(tiny_model, **model), data_module(collector=collector)
    trainer = trainer_of(tmp_path, [WeightSync()], logger=False)
    data.trainer = module.trainer = trainer
    trainer.strategy.connect(module)  # so that the trainer knows its module
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        data.load_prompts("fit")
    messages = [str(w.message) for w in seen if "asynchronous rollouts" in str(w.message)]
    assert len(messages) == warns
    assert all("nothing corrects for it; set model.update.use_rollout" in m for m in messages)


# ---------------------------------------------------------------- in the loss


def test_weights_multiply_the_policy_loss_but_not_the_kl():
    logprobs = torch.tensor([-1.0, -2.5], dtype=torch.double, requires_grad=True)
    tokens = tokens_of([4.0, 0.5], [0, 1])
    tokens["old_logprobs"] = logprobs.detach()
    tokens["rollout_logprobs"] = logprobs.detach() - torch.tensor([4.0, 0.5]).double().log()
    tokens["advantages"] = torch.tensor([1.0, -3.0], dtype=torch.double)
    tokens["ref_logprobs"] = torch.tensor([-1.5, -2.5], dtype=torch.double)
    scores = Scores(torch.arange(2), logprobs, torch.zeros(2), None)
    objective = Objective(PPOClip(), correction=TokenTIS(cap=2.0), kl=K2Penalty(0.1))
    loss, metrics = objective(scores, tokens, iteration=0)
    loss.sum().backward()
    # -w A + 0.1 d^2 / 2, with w = 2 and 0.5 and d = 0.5 and 0
    assert loss.tolist() == pytest.approx([-2 + 0.0125, 1.5])
    assert logprobs.grad.tolist() == pytest.approx([-2 + 0.05, 1.5])
    assert metrics["policy/loss"].tolist() == pytest.approx([-2, 1.5])
    assert metrics["rollout/logprob_gap_max"].tolist() == pytest.approx([math.log(4), math.log(2)])


@pytest.mark.parametrize("budget", [100_000, 25])
@pytest.mark.parametrize("make", [TokenTIS, SequenceTIS, GeometricTIS])
def test_metrics_of_an_iteration_do_not_depend_on_micro_batches(
    tiny_model, train_on, random_batch, make, budget
):
    module = PolicyModule(
        str(tiny_model),
        correction=make(cap=1.5),
        update={"max_tokens_per_micro_batch": budget, "ppo_epochs": 2},
    )
    module.configure_model()

    def collected():
        batch = random_batch(41)
        batch["tokens", "rollout_logprobs"] *= 6  # -6 for every token: some likelier, some not
        return batch

    batch = module.learner.compute_old_logprobs(collected())
    mask = batch["tokens", "loss_mask"]
    row = torch.repeat_interleave(torch.arange(12), batch["rollouts", "length"])[mask]
    gap = (batch["tokens", "old_logprobs"] - batch["tokens", "rollout_logprobs"])[mask].double()
    if make is GeometricTIS:
        gap = torch.stack([gap[row == r].mean() for r in row])
    elif make is SequenceTIS:
        gap = torch.stack([gap[row == r].sum() for r in row])
    w = gap.exp()
    train_on(module, [collected()])
    metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    expected = {
        "weight_mean": w.clamp(max=1.5).mean(),
        "weight_max": w.max(),
        "corrected_share": (w > 1.5).double().mean(),
        "ess_share": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }
    for name, value in expected.items():
        assert metrics[f"correction/{name}"] == pytest.approx(float(value), rel=1e-4), name
    assert 0 < expected["corrected_share"] < 1
    assert metrics["rollout/logprob_gap_mean"] > 0.1


def test_the_effective_share_by_hand(tiny_model, train_on, make_rollout):
    """Weights 1 and 3, of two rollouts each, give (2 + 6)^2 / (4 (2 + 18)) = 0.8."""
    module = PolicyModule(str(tiny_model), correction=TokenTIS())
    module.configure_model()
    torch.nn.init.zeros_(module.policy.lm.get_output_embeddings().weight)  # all 16 alike
    uniform = -math.log(16)
    engine = [uniform, uniform - math.log(3)]
    rollouts = [make_rollout([3], [4, 1], logprobs=engine, reward=r) for r in (0.0, 1.0)]
    train_on(module, [pack_rollouts(rollouts)])
    metrics = module.trainer.callback_metrics
    assert float(metrics["correction/ess_share"]) == pytest.approx(0.8, rel=1e-5)
    assert float(metrics["correction/weight_mean"]) == pytest.approx(1.5, rel=1e-5)
    assert float(metrics["correction/weight_max"]) == pytest.approx(3.0, rel=1e-5)
    assert float(metrics["correction/corrected_share"]) == 0.5
