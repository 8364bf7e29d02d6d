"""Test a run on a model object, from a script."""

import torch
from transformers import AutoModelForCausalLM

from lightning_rl import HFExport, PolicyModule, WeightSync
from tests.support.small_run import adamw, data_module, trainer_of


def test_a_run_on_a_model_object_leaves_it_and_exports_another(tiny_model, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    start = lm.model.norm.weight.clone()

    module = PolicyModule(lm, optimizer=adamw(1e-2), update={"seed": 7})
    prompts = [f"{n}=" for n in range(100, 120)]
    data = data_module(train_prompts=prompts, evaluation=None, iterations_per_epoch=2)
    export = HFExport(str(tmp_path / "hf"))
    trainer_of(tmp_path, [WeightSync(), export]).fit(module, data)
    weights = dict(module.policy.named_weights())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert torch.equal(loaded["model.norm.weight"], weights["model.norm.weight"])
    assert not torch.equal(loaded["model.norm.weight"], start)
    assert torch.equal(lm.model.norm.weight, start)
