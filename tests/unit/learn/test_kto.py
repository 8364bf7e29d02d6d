"""Test KTO: the loss by hand and as TRL has it, examples from files, and that it learns."""

import math

import pytest
import torch
from torch import nn

from lightning_rl.data.sources import IterablePrompts
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.learn.kto import KTODataModule, KTOModule, kto
from tests.support.doubles import EXACT, doubled
from tests.support.small_run import fit
from tests.support.supervised import load_in_double, plain_logprob


def test_loss_by_hand():
    # beta (r - kl) = 0.5 (3 - 1) = 1 and 0.5 (0 - 1) = -1/2, of which bad completions have the sign
    ratios = torch.tensor([3.0, 3.0, 0.0, 0.0], dtype=torch.double)
    good = torch.tensor([True, False, True, False])
    losses = kto(ratios, good, torch.tensor(1.0), beta=0.5)
    expected = [1 / (1 + math.exp(x)) for x in (1, -1, -0.5, 0.5)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


ROWS = [
    {"prompt": f"{n}=", "completion": "12"[n % 2] * (1 + n % 3), "label": n % 2 == 0}
    for n in range(40)
]


def test_first_loss_is_a_half_and_training_separates_the_kinds(tiny_model, tmp_path):
    module = KTOModule(str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    rows = KTODataModule(IterablePrompts(ROWS), IterablePrompts(ROWS[:4]), batch_size=8)
    trainer, losses = fit(module, rows, tmp_path, max_epochs=4)
    assert losses[0] == pytest.approx(0.5, abs=1e-5)  # policy and reference are the same
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.callback_metrics["kto/val_accuracy"] == 1.0
    assert trainer.callback_metrics["kto/kl"] >= 0


@pytest.mark.parametrize("towards", [1.0, -1.0])
def test_the_loss_is_trls_of_plain_transformers(tiny_model, in_double, towards):
    """TRL's formula takes each completion's logprobs alone, with a KL above 0, and one cut at 0."""
    weights = {"desirable_weight": 0.75, "undesirable_weight": 1.5}
    module = KTOModule(str(tiny_model), beta=0.3, **weights)
    data = KTODataModule(IterablePrompts(ROWS[:5]), batch_size=5)
    tokenizer = load_in_double(module, data)
    policy, reference = module.policy.lm, module.reference.policy.lm
    moved = (policy, reference) if towards > 0 else (reference, policy)
    with torch.no_grad():
        for parameter in moved[0].parameters():
            nn.init.normal_(parameter, std=0.2)
    batch = doubled(data.batch(data.rows(data.train), range(5), range(5)))
    module.begin_step([batch])
    sums = module.sums(batch)
    loss = sums["loss"][0] / sums["loss"][1]
    for lm in (policy, reference):
        lm.set_attn_implementation("eager")

    def log_ratio(prompt, completion):
        ours, theirs = (
            plain_logprob(lm, tokenizer, prompt, completion) for lm in (policy, reference)
        )
        return ours - theirs

    rows = ROWS[:5]
    previous = [rows[-1], *rows[:-1]]
    pairs = zip(rows, previous, strict=True)
    apart = [log_ratio(row["prompt"], other["completion"]) for row, other in pairs]
    kl = torch.stack(apart).mean().detach().clamp(min=0)
    losses = []
    for row in rows:
        ratio = log_ratio(row["prompt"], row["completion"])
        if row["label"]:
            losses.append(0.75 * (1 - (0.3 * (ratio - kl)).sigmoid()))
        else:
            losses.append(1.5 * (1 - (0.3 * (kl - ratio)).sigmoid()))
    expected = torch.stack(losses).mean()
    assert float(loss) == pytest.approx(float(expected), rel=EXACT)
    assert module._kl == pytest.approx(float(kl), rel=EXACT, abs=1e-12)
    parameters = list(policy.parameters())
    theirs = torch.autograd.grad(expected, parameters)
    for ours, other in zip(torch.autograd.grad(loss, parameters), theirs, strict=True):
        assert float((ours - other).norm()) <= 1e-6 * float(other.norm()) + 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KTOModule("unused", beta=0.0), r"KTOModule\(beta=0.0\) must be > 0"),
        (lambda: KTOModule("unused", desirable_weight=-1.0), "desirable_weight=-1.0, .*>= 0"),
        (lambda: KTOModule("unused", 0.0, 0.0), "one > 0"),
        (lambda: KTOModule("unused", undesirable_weight=math.nan), "undesirable_weight=nan"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_single_row_is_refused(tiny_model, tmp_path):
    with pytest.raises(DataError, match="1 rows; KTO needs at least 2"):
        fit(KTOModule(str(tiny_model)), KTODataModule(IterablePrompts(ROWS[:1])), tmp_path)


@pytest.mark.parametrize("label", [None, "good", 0.5])
def test_a_label_that_is_none_is_named(tiny_model, tmp_path, label):
    rows = [ROWS[0], ROWS[1] | {"label": label}]
    data = KTODataModule(IterablePrompts(rows), batch_size=2)
    with pytest.raises(DataError, match=f"'label' must be true or false, got {label!r}"):
        fit(KTOModule(str(tiny_model)), data, tmp_path)
