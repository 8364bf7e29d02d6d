"""Frozen weights are pushed once, and again whenever the engine may not have them."""

import pytest
import torch

from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.push import Push
from lightning_rl.errors import IncompleteWeightsError, WrongWeightsError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.sync.base import push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights
from tests.support.tiny_vision import save_vision_model

FROZEN = "model.layers.0."


class Noting(TransformersEngine):
    """Notes which weights a push brings."""

    def load_weights(self, weights, version):
        self.brought = []

        def passing():
            for name, weight in weights:
                self.brought.append(name)
                yield name, weight

        super().load_weights(Push(passing(), Push.of(weights).kept), version)


class Link:
    """A policy, an engine in this process and what connects them."""

    def __init__(self, policy, folder, transport=None):
        self.policy, self.sent = policy, SentWeights()
        save_skeleton(policy.model, folder)
        self.folder, self.engine = folder, Noting(dtype="float32", device="cpu")
        self.engine.start(folder)
        self.transport = transport or MemoryTransport()
        self.transport.connect(self.engine)

    def train(self):
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01)

    def push(self, version):
        """Push, return what came, and compare all that the engine holds with the policy."""
        compared = push(self.transport, self.engine, self.policy, version, self.sent)
        weights = dict(self.policy.named_weights())
        assert compared == len(weights)
        held = self.engine._lm.state_dict()
        assert all(torch.equal(held[name], weight) for name, weight in weights.items())
        return set(self.engine.brought)


@pytest.fixture
def link(tiny_model, tmp_path):
    policy = Policy(str(tiny_model))
    policy.lm.model.layers[0].requires_grad_(False)
    return Link(policy, tmp_path / "engine")


@pytest.fixture
def names(link):
    """Return all names, and those that are trained."""
    everything = set(dict(link.policy.named_weights()))
    return everything, {name for name in everything if not name.startswith(FROZEN)}


def test_frozen_weights_are_pushed_once(link, names):
    everything, trained = names
    assert 0 < len(trained) < len(everything)
    assert link.push(0) == everything
    for version in (1, 2):
        link.train()
        assert link.push(version) == trained


def test_an_engine_that_may_lack_them_gets_all(link, names):
    everything, trained = names
    link.push(0)
    link.engine.close()
    link.engine.start(link.folder)
    assert link.push(1) == everything  # it was restarted
    assert link.push(2) == trained
    link.engine.load_weights(link.policy.named_weights(), 7)  # by somebody else
    assert link.push(3) == everything
    with torch.no_grad():
        link.engine._lm.model.layers[0].mlp.up_proj.weight.add_(1.0)
    with pytest.raises(WrongWeightsError, match=rf"another '{FROZEN}mlp.up_proj.weight'"):
        link.push(4)
    assert link.push(4) == everything  # after a push that failed


def test_what_is_frozen_may_change(link, names):
    everything, trained = names
    layer = link.policy.lm.model.layers[0]
    link.push(0)
    with torch.no_grad():
        layer.mlp.up_proj.weight.add_(1.0)  # such as a checkpoint that is loaded
    assert link.push(1) == everything
    assert link.push(2) == trained
    layer.mlp.requires_grad_(True)
    assert link.push(3) == everything
    link.train()
    rest = {name for name in everything if name.startswith(f"{FROZEN}mlp.")}
    assert link.push(4) == trained | rest
    # Trained between two pushes, and frozen again by the second.
    layer.mlp.requires_grad_(False)
    link.push(5)
    layer.mlp.requires_grad_(True)
    link.train()
    layer.mlp.requires_grad_(False)
    assert link.push(6) == everything


def test_modules_come_as_a_whole(tiny_model, tmp_path):
    """Engines fuse the matrices of a module: with one that moves, all of them come."""
    policy = Policy(str(tiny_model))
    policy.lm.model.layers[0].mlp.up_proj.requires_grad_(False)
    link = Link(policy, tmp_path / "engine")
    assert link.push(0) == link.push(1) == set(dict(policy.named_weights()))


def test_of_a_lora_what_is_adapted_comes(tiny_model, tmp_path):
    policy = Policy(str(tiny_model), lora=LoRA(rank=2, target_modules=["q_proj"]))
    link = Link(policy, tmp_path / "engine")
    everything = link.push(0)
    link.train()
    assert link.push(1) == {name for name in everything if ".self_attn." in name}


def test_a_frozen_tower_is_pushed_once(tmp_path):
    policy = Policy(str(save_vision_model(tmp_path / "model", "qwen2_5_vl")))
    link = Link(policy, tmp_path / "engine")
    everything = link.push(0)
    assert any(".visual." in name for name in everything)
    assert link.push(1) == {name for name in everything if ".visual." not in name}


def test_a_file_is_whole(tiny_model, tmp_path):
    policy = Policy(str(tiny_model))
    policy.lm.model.layers[0].requires_grad_(False)
    link = Link(policy, tmp_path / "engine", CheckpointTransport(str(tmp_path / "files")))
    assert link.push(0) == link.push(1) == set(dict(policy.named_weights()))


def test_a_weight_that_is_missing_is_no_frozen_one(link, names):
    everything, _ = names
    link.push(0)
    missing = f"{FROZEN}mlp.up_proj.weight"
    weights = link.transport.weights_of(link.policy)
    lacking = Push(weights, weights.kept - {missing})
    with pytest.raises(IncompleteWeightsError, match=rf"lacks 1 of .*'{missing}'"):
        link.transport.push(lacking, 1)
    assert link.push(2) == everything
