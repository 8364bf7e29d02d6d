"""Runs on pictures: a tiny image-text model is trained end to end."""

import asyncio
import json
import pickle

import pytest
import torch

from lightning_rl import LoRA, PolicyModule, Vision
from lightning_rl.callbacks import WeightSync
from lightning_rl.data.sources import JSONLPrompts
from lightning_rl.rollout import Rollout
from lightning_rl.vision.loading import decode
from tests.support.small_run import SaveAfter, adamw, data_module, trainer_of
from tests.support.tiny_vision import FAMILIES, picture, save_vision_model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Six questions about pictures of three sizes; the last one has no picture."""
    folder = tmp_path_factory.mktemp("rows")
    lines = []
    for seed, size in enumerate([(32, 32), (64, 32), (32, 48), (32, 32), (48, 48)]):
        decode(picture(seed, *size)).save(folder / f"{seed}.png")
        parts = [{"type": "image", "image": f"{seed}.png"}, {"type": "text", "text": "How many?"}]
        lines.append({"prompt": [{"role": "user", "content": parts}], "answer": str(seed)})
    lines.append({"prompt": [{"role": "user", "content": "How many?"}], "answer": "7"})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def share_of_digits(completion_ids, **columns):
    """In [0, 1]: of what was written, how much are tokens below the middle of the vocabulary."""
    return [sum(token < 100 for token in ids) / len(ids) for ids in completion_ids]


def run(model, rows, tmp_path, callbacks=(), data=None, ckpt_path=None, **options):
    options = {"optimizer": adamw(3e-3), "seed": 7} | options
    module = PolicyModule(str(model), **options)
    settings = {
        "train_prompts": JSONLPrompts(str(rows), seed=1),
        "eval_prompts": None,
        "rewards": [share_of_digits],
        "success_reward": 0.5,
        "group_size": 4,
        "groups_per_iteration": 4,
        "iterations_per_epoch": 2,
    } | (data or {})
    trainer = trainer_of(tmp_path, [WeightSync(), *callbacks])
    trainer.fit(module, data_module(**settings), ckpt_path=ckpt_path)
    return module, trainer


def gap(trainer):
    return float(trainer.callback_metrics["rollout/logprob_gap_max"])


def changed(module, model):
    """Names of weights that a run has changed, by part."""
    before = PolicyModule(str(model), vision=module.vision)
    before.configure_model()
    old = dict(before.policy.lm.named_parameters())
    moved = [n for n, p in module.policy.lm.named_parameters() if not torch.equal(p, old[n])]
    parts = ("visual.merger", "deepstack", "projector", "visual", "vision_tower", "language_model")
    return {next((part for part in parts if part in name), name) for name in moved}


def test_every_family_learns(model, rows, tmp_path):
    module, trainer = run(model, rows, tmp_path)
    assert gap(trainer) < 1e-5
    assert changed(module, model) <= {"language_model", "lm_head.weight"}


def test_a_tower_is_trained_at_its_own_rate(qwen, rows, tmp_path):
    vision = Vision(train_tower=True, train_projector=True, tower_lr=1e-4)
    module, trainer = run(qwen, rows, tmp_path, vision=vision)
    assert gap(trainer) < 1e-5  # the engine has got the tower's weights, too
    assert changed(module, qwen) == {"language_model", "lm_head.weight", "visual", "visual.merger"}
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [3e-3, 1e-4]


def test_a_projector_alone(qwen, rows, tmp_path):
    module, _ = run(qwen, rows, tmp_path, vision=Vision(train_projector=True))
    assert changed(module, qwen) == {"language_model", "lm_head.weight", "visual.merger"}
