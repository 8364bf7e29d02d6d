"""A run on a model object, from a script: saved, gone on with, exported."""

import torch
from transformers import AutoModelForCausalLM

from lightning_rl import HFExport, IterationCheckpoint, PolicyModule, WeightSync
from tests.support.small_run import adamw, data_module, trainer_of


def test_a_run_on_a_model_object_is_gone_on_with_and_exported(tiny_model, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    start = lm.model.norm.weight.clone()

    def fit(place, epochs: int, ckpt_path: str | None = None) -> PolicyModule:
        module = PolicyModule(lm, optimizer=adamw(1e-2), seed=7)
        prompts = [f"{n}=" for n in range(100, 120)]
        data = data_module(train_prompts=prompts, eval_prompts=None, iterations_per_epoch=2)
        callbacks = [WeightSync(), HFExport(), IterationCheckpoint(dirpath=place / "saved")]
        trainer = trainer_of(place, callbacks, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return module

    whole = fit(tmp_path / "whole", 2)
    fit(tmp_path / "half", 1)
    resumed = fit(tmp_path / "half", 2, str(tmp_path / "half" / "saved" / "last.ckpt"))

    weights = dict(resumed.policy.named_weights())
    for name, weight in whole.policy.named_weights():
        assert torch.equal(weights[name], weight), name
    [exported] = (tmp_path / "whole").rglob("hf")
    loaded = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert torch.equal(loaded["model.norm.weight"], weights["model.norm.weight"])
    assert not torch.equal(loaded["model.norm.weight"], start)
    assert torch.equal(lm.model.norm.weight, start)
