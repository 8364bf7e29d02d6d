"""Test that what a configuration says of environments for verifiers is kept whole."""

from importlib import import_module

import pytest

from lightning_rl.extend import Agent, PromptDataset
from lightning_rl.verifiers import VerifiersAgent, VerifiersPrompts
from tests.support.dumped import of, require_same_again


@pytest.mark.parametrize(
    ("component", "hint"), [(VerifiersAgent, Agent), (VerifiersPrompts, PromptDataset)]
)
def test_a_class_with_its_defaults_is_told_whole_and_read_again(component, hint, tmp_path):
    part = of(component.__name__, environment="game", python="python")
    _, told = require_same_again(hint, part, tmp_path / "part.yaml")
    module, _, name = told["class_path"].rpartition(".")
    assert getattr(import_module(module), name) is component
    assert told["init_args"]["environment"] == "game"
    assert told["init_args"]["options"] is None
