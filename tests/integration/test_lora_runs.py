"""Test runs of a LoRA in bf16 whose engine keeps adapters apart: done again, exported."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl import HFExport, WeightSync
from lightning_rl.cli.rerun.compare import rerun_iteration
from lightning_rl.cli.rerun.rollouts import rerun_rollout
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.engines.base import logprob_tolerance
from lightning_rl.models.lora import LoRA
from tests.support.lots import LotEngine
from tests.support.recorded_run import make_place, stand_in, train
from tests.support.small_run import data_module, grpo, trainer_of
from tests.support.tolerances import bfloat16_rounding


class Apart(LotEngine):
    """Notes what the pushes bring."""

    def load_weights(self, weights, version):
        weights = list(weights)
        self.came = [*getattr(self, "came", []), all(".lora_" in name for name, _ in weights)]
        super().load_weights(weights, version)


def fitted(model, path, *callbacks):
    engine, module = Apart(device="cpu"), grpo(model, lora=LoRA(rank=4))
    torch.manual_seed(0)  # of the adapters' first weights
    trainer = trainer_of(path, [WeightSync(), *callbacks], precision="bf16-mixed")
    data = data_module(iterations_per_epoch=3, engine=engine, evaluation=None)
    trainer.fit(module, data)
    return module, trainer, engine


def test_what_is_exported_is_what_was_sampled(tiny_model, tmp_path):
    adapter, whole = (str(tmp_path / name) for name in ("adapter", "whole"))
    module, trainer, engine = fitted(tiny_model, tmp_path, HFExport(adapter))
    module.loaded_policy.save_pretrained(whole)
    # The base came before the first iteration, then adapters alone, after each.
    assert engine.came == [False, True, True, True]
    gap = float(trainer.callback_metrics["rollout/logprob_gap_max"])
    assert gap < bfloat16_rounding(tiny_model, magnitude=4.0)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        one, other = (
            AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits
            for path in (adapter, whole)
        )
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_recorded_run_is_done_again(tiny_model, tmp_path, monkeypatch):
    place = make_place(tmp_path)
    options = ["--trainer.precision", "bf16-mixed", "--model.lora", "LoRA", "--model.kl", "null"]
    finished = train(place, tiny_model, *options)
    stand_in(place, monkeypatch)
    run = RecordedRun(finished)
    rerun = rerun_iteration(run, 4)
    assert rerun.equal, rerun.lines()
    recorded = run.log.rollouts(4)[5]
    [generated] = rerun_rollout(run, recorded.id)
    assert generated.again.token_ids == recorded.token_ids
    assert generated.gap < logprob_tolerance("bfloat16")
    assert generated.gap == pytest.approx(0, abs=0.05)
