"""Test SFTModule: the warm start lowers its loss, on the right tokens."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import AutoModelForCausalLM

from lightning_rl.data.sources import IterablePrompts
from lightning_rl.data.supervised import supervised_rollout
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.learn.dpo import DPOModule
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from lightning_rl.models.policy import load_tokenizer
from lightning_rl.rollout import Prompt
from tests.support.small_run import Losses, fit, trainer_of
from tests.support.tolerances import scores_rounding

ROWS = [{"prompt": f"{n}=", "completion": f"{n}"[::-1]} for n in range(100, 164)]


def test_a_row_becomes_a_rollout_that_ends(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    prompt = Prompt("0", "12=", [4, 5, 2], {"completion": "21"})
    rollout = supervised_rollout(prompt, "completion", tokenizer)
    assert rollout.token_ids == [5, 4, 1]
    assert rollout.loss_mask == [True] * 3


def test_a_row_without_a_completion_is_named(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    with pytest.raises(DataError, match=r"row 7: 'completion' must be a string.*, got 5"):
        supervised_rollout(Prompt("7", "1=", [4, 2], {"completion": 5}), "completion", tokenizer)


def test_training_lowers_the_loss(tiny_model, tmp_path):
    module = SFTModule(str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    rows, held_out = IterablePrompts(ROWS[:-8]), IterablePrompts(ROWS[-8:])
    data = SFTDataModule(rows, val=held_out, batch_size=16)
    # Rounding would decide later epochs: this step size is a large one.
    trainer, losses = fit(module, data, tmp_path, max_epochs=5)
    assert losses[0] > math.log(16)  # worse than guessing
    assert losses[-1] < 0.5 * losses[0]
    assert float(trainer.callback_metrics["sft/val_loss"]) < losses[0]


def test_a_run_resumed_after_an_epoch_trains_in_the_order_of_the_whole_one(tiny_model, tmp_path):
    def train(epochs, ckpt_path=None):
        module = SFTModule(str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
        losses, saver = Losses(), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer = trainer_of(
            tmp_path, [losses, saver], logger=False, max_epochs=epochs, enable_checkpointing=True
        )
        data = SFTDataModule(IterablePrompts(ROWS[:22]), batch_size=8, seed=3)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return losses.seen, module.state_dict()

    whole, expected = train(3)
    resumed, weights = train(3, tmp_path / "epoch=0.ckpt")
    assert len(whole) == 9
    assert resumed == whole[3:]
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_a_checkpoint_holds_the_day_that_templates_tell(tiny_model):
    module, resumed, checkpoint = SFTModule(str(tiny_model)), SFTModule(str(tiny_model)), {}
    module.day.date = "2024-02-29"
    module.on_save_checkpoint(checkpoint)
    resumed.on_load_checkpoint(checkpoint)
    told = resumed.day.told()
    assert (told["%d"], told["%b"]) == ("29", "Feb")


def test_the_loss_is_the_mean_cross_entropy_of_completion_tokens(tiny_model, tmp_path):
    module = SFTModule(str(tiny_model), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    rows = [*ROWS[:2], {"prompt": "7=", "completion": ""}]  # its end token only
    _, (loss,) = fit(
        module, SFTDataModule(IterablePrompts(rows), batch_size=3), tmp_path, max_epochs=1
    )
    plain, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model),
        load_tokenizer(str(tiny_model)),
    )
    nll = []
    for row in rows:
        start = len(row["prompt"])
        ids = torch.tensor([[*tokenizer(row["prompt"] + row["completion"]).input_ids, 1]])
        logits = plain(input_ids=ids).logits[0, start - 1 : -1]
        nll.append(torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="none"))
    bound = scores_rounding(tiny_model, torch.cat(nll))
    assert loss == pytest.approx(float(torch.cat(nll).mean()), abs=bound)


def test_an_sft_data_module_wants_an_sft_module(tiny_model, tmp_path):
    from lightning_rl.module import PolicyModule

    with pytest.raises(ConfigError, match="works with SFTModule, not PolicyModule"):
        fit(
            PolicyModule(str(tiny_model)),
            SFTDataModule(IterablePrompts(ROWS)),
            tmp_path,
            max_epochs=1,
        )


def test_a_batch_size_of_zero_is_refused():
    with pytest.raises(ConfigError, match="batch_size=0 must be >= 1"):
        SFTDataModule(IterablePrompts(ROWS), batch_size=0)


def test_a_strategy_that_leaves_sharding_to_the_module_is_refused(tiny_model, tmp_path):
    """Else each rank would train alone, and say nothing."""
    for module in (SFTModule(str(tiny_model)), DPOModule(str(tiny_model))):
        trainer = trainer_of(tmp_path, strategy=ModelParallelStrategy(), logger=False)
        module._trainer, module._device_mesh = trainer, object()
        name = type(module).__name__
        match = f"{name} does not shard its model, so under ModelParallelStrategy"
        with pytest.raises(ConfigError, match=match):
            module.configure_model()
        assert module.policy is None
