"""Test what a checkpoint tells of a run that a script put together."""

import inspect

from lightning_rl.config.layers import described
from lightning_rl.module import PolicyModule
from tests.support.small_run import data_module, grpo, trainer_of


def test_a_module_is_described_by_the_arguments_that_it_takes(tiny_model, tmp_path):
    module = grpo(tiny_model, gradient_checkpointing=True, trust_remote_code=True)
    table = described(module, data_module(), trainer_of(tmp_path))
    names = {key.split(".")[1] for key in table if key.startswith("model.")}
    assert names <= set(inspect.signature(PolicyModule).parameters)
    assert table["model.loading.gradient_checkpointing"]
    assert table["model.loading.trust_remote_code"]
    assert {"model.update.minibatches", "model.update.ppo_epochs", "model.learner"} <= set(table)
