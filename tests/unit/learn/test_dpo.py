"""Test DPO: the loss by hand, pairs from files and from recorded rollouts, and that it learns."""

import json
import math

import pytest
import torch
from torch import nn

from lightning_rl import BaseReference, LoRA
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.learn.dpo import DPOModule, PairDataModule, RolloutPairs, dpo
from tests.support.doubles import EXACT, doubled
from tests.support.small_run import fit
from tests.support.supervised import load_in_double, plain_logprob


def test_loss_by_hand():
    # beta (m - m_ref) = 0.5 (3 - 1) = 1 and 0.5 (0 - 2) = -1
    margins, references = torch.tensor([3.0, 0.0]), torch.tensor([1.0, 2.0])
    losses = dpo(margins, references, beta=0.5)
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(1 + math.e)])
    smoothed = dpo(margins, references, beta=0.5, smoothing=0.25)
    right, wrong = math.log(1 + math.exp(-1)), math.log(1 + math.e)
    both = [0.75 * right + 0.25 * wrong, 0.75 * wrong + 0.25 * right]
    assert smoothed.tolist() == pytest.approx(both)


def test_gradient_is_half_beta_where_policy_and_reference_agree():
    margin = torch.zeros(1, dtype=torch.double, requires_grad=True)
    dpo(margin, torch.zeros(1).double(), beta=0.3).sum().backward()
    assert margin.grad.tolist() == pytest.approx([-0.15])  # -beta sigmoid(0)


PAIRS = [
    {"prompt": f"{n}=", "chosen": "1" * (1 + n % 3), "rejected": "2" * (1 + n % 2)}
    for n in range(40)
]


def test_first_loss_is_log_2_and_training_separates_the_pairs(tiny_model, tmp_path):
    module = DPOModule(str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    data = PairDataModule(IterablePrompts(PAIRS), batch_size=8)
    trainer, losses = fit(module, data, tmp_path, max_epochs=4)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are the same
    assert trainer.callback_metrics["dpo/accuracy"] == 1.0
    assert losses[-1] < 0.5 * losses[0]


def test_a_checkpoint_of_a_lora_leaves_its_base_to_the_models_files(tiny_model, tmp_path):
    """Supervised modules once saved it, too."""
    module = DPOModule(str(tiny_model), lora=LoRA(rank=2), reference=BaseReference())
    trainer, _ = fit(module, PairDataModule(IterablePrompts(PAIRS), batch_size=8), tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    held = torch.load(tmp_path / "last.ckpt")["state_dict"]
    assert held.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
    again = DPOModule.load_from_checkpoint(
        tmp_path / "last.ckpt", lora=LoRA(rank=2), reference=BaseReference()
    )
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, module.state_dict()[name]), name


def test_margins_equal_plain_transformers(tiny_model, in_double):
    """A plain forward of each completion alone gives the pair's loss."""
    module = DPOModule(str(tiny_model), beta=0.7)
    data = PairDataModule(IterablePrompts(PAIRS[:5]), batch_size=5)
    tokenizer = load_in_double(module, data)
    with torch.no_grad():
        for parameter in module.policy.lm.parameters():
            nn.init.normal_(parameter, std=0.2)  # away from the reference
    loss, pairs = module.sums(doubled(data.collate(data.rows(data.train))))["loss"]
    assert pairs == 5

    policy, reference = module.policy.lm, module.reference.policy.lm
    for lm in (policy, reference):
        lm.set_attn_implementation("eager")
    expected = []
    for row in PAIRS[:5]:
        margins = [
            plain_logprob(lm, tokenizer, row["prompt"], row["chosen"])
            - plain_logprob(lm, tokenizer, row["prompt"], row["rejected"])
            for lm in (policy, reference)
        ]
        expected.append(-nn.functional.logsigmoid(0.7 * (margins[0] - margins[1])))
    assert float(loss) == pytest.approx(float(torch.stack(expected).sum()), rel=EXACT)


def record(make_rollout, group, reward, tokens):
    rollout = make_rollout([3, 2], tokens, group_id=group, reward=reward)
    return json.dumps(rollout.to_dict()) + "\n"


def test_pairs_from_rollouts_are_best_against_worst_of_each_group(
    make_rollout, tiny_model, tmp_path
):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        record(make_rollout, "a", 0.2, [3, 1])
        + record(make_rollout, "a", 1.0, [4, 1])
        + record(make_rollout, "a", 0.5, [5, 1])
        + record(make_rollout, "b", 1.0, [6, 1])  # no spread: no pair
        + record(make_rollout, "b", 1.0, [7, 1])
        + record(make_rollout, "c", 0.6, [8, 1])
        + record(make_rollout, "c", 0.5, [9, 1])
    )
    rows = [row for _, row in RolloutPairs(str(path)).read()]
    assert [(row["chosen"], row["rejected"]) for row in rows] == [
        ([4, 1], [3, 1]),
        ([8, 1], [9, 1]),
    ]
    rows = [row for _, row in RolloutPairs(str(path), min_gap=0.2).read()]
    assert [row["chosen"] for row in rows] == [[4, 1]]


def test_pairs_come_from_any_rollout_file(make_rollout, tmp_path):
    path = str(tmp_path / "rollouts.sqlite")
    group = [make_rollout([3], [token, 1], reward=r) for token, r in ((4, 0.0), (5, 1.0))]
    open_rollouts(path).append(group, iteration=0)
    ((_, row),) = RolloutPairs(path).read()
    assert (row["chosen"], row["rejected"]) == ([5, 1], [4, 1])


def test_a_line_that_is_no_rollout_is_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt": "1="}\n')
    with pytest.raises(DataError, match=r"rollouts.jsonl:1: not a rollout as"):
        list(RolloutPairs(str(path)).read())


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"smoothing": 0.5}, {"smoothing": -0.1}])
def test_impossible_values_are_refused(options):
    with pytest.raises(ConfigError, match=r"must be > 0|must be in \[0, 0.5\)"):
        DPOModule("unused", **options)


def test_a_pair_data_module_wants_a_dpo_module(tiny_model, tmp_path):
    from lightning_rl.learn.sft import SFTModule

    with pytest.raises(ConfigError, match="PairDataModule works with DPOModule, not SFTModule"):
        fit(SFTModule(str(tiny_model)), PairDataModule(IterablePrompts(PAIRS)), tmp_path)
