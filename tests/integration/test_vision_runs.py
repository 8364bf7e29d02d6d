"""Test runs on pictures: a tiny image-text model is trained end to end.

Slow: each run trains a model that sees from the start.
"""

import json
import pickle
import shutil

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from lightning_rl import (
    GAE,
    Critic,
    FrozenReference,
    K3Penalty,
    LoRA,
    MultiTurn,
    PolicyModule,
    Sampling,
    SeparateValueHead,
    SFTDataModule,
    SFTModule,
    SharedValueHead,
    StreamedCollector,
    TokenTIS,
    TransformersEngine,
    Vision,
)
from lightning_rl.agents.base import Environment, Reply
from lightning_rl.callbacks import HFExport, WeightSync
from lightning_rl.cli.rerun.compare import rerun_iteration
from lightning_rl.cli.rerun.rollouts import rerun_rollout
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.samplers import Mixed
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import JSONLPrompts
from lightning_rl.errors import ConfigError
from lightning_rl.models.lora import adapted_layers
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Rollout
from lightning_rl.vision.loading import decode
from tests.support.engine_checks import ROUNDING
from tests.support.grouped import grouped
from tests.support.lots import LotEngine
from tests.support.recorded_run import make_place, stand_in, train
from tests.support.small_run import adamw, data_module, trainer_of
from tests.support.tiny_vision import (
    FAMILIES,
    picture,
    save_picture_rows,
    save_vision_model,
    share_of_even,
)
from tests.support.tolerances import rounding

AGREED = rounding(additions=4_000, magnitude=8.0)
"""In nats, 3e-4: of logprobs up to 8, by the sums of these models. An engine that misses what two
iterations changed is off by 4e-3 where it is the tower, and by 0.8 where it is the language model.
"""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return save_picture_rows(tmp_path_factory.mktemp("rows"))


def run(model, rows, tmp_path, callbacks=(), data=None, **options):
    options = {"optimizer": adamw(3e-3), "seed": 7} | options
    module = PolicyModule(str(model), **grouped(**options))
    settings = {
        "train_prompts": JSONLPrompts(str(rows), seed=1),
        "evaluation": None,
        "rewards": [share_of_even],
        "group_size": 4,
        "groups_per_iteration": 4,
        "iterations_per_epoch": 2,
    } | (data or {})
    trainer = trainer_of(tmp_path, [WeightSync(), *callbacks])
    trainer.fit(module, data_module(**settings))
    return module, trainer


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def gap(trainer):
    return float(trainer.callback_metrics["rollout/logprob_gap_max"])


def changed(module, model):
    """Return names of weights that a run has changed, by part."""
    before = PolicyModule(str(model), vision=module.vision)
    before.configure_model()
    old = dict(before.policy.lm.named_parameters())
    moved = [n for n, p in module.policy.lm.named_parameters() if not torch.equal(p, old[n])]
    parts = ("visual.merger", "deepstack", "projector", "visual", "vision_tower", "language_model")
    return {next((part for part in parts if part in name), name) for name in moved}


def test_every_family_learns(model, rows, tmp_path):
    module, trainer = run(model, rows, tmp_path)
    assert gap(trainer) < AGREED
    assert changed(module, model) <= {"language_model", "lm_head.weight"}


def test_a_tower_is_trained_at_its_own_rate(qwen, rows, tmp_path):
    vision = Vision(train_tower=True, train_projector=True, tower_lr=1e-4)
    module, trainer = run(qwen, rows, tmp_path, vision=vision)
    assert gap(trainer) < AGREED  # the engine has got the tower's weights, too
    assert changed(module, qwen) == {"language_model", "lm_head.weight", "visual", "visual.merger"}
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [3e-3, 1e-4]


@pytest.mark.slow
def test_a_projector_alone(qwen, rows, tmp_path):
    module, _ = run(qwen, rows, tmp_path, vision=Vision(train_projector=True))
    assert changed(module, qwen) == {"language_model", "lm_head.weight", "visual.merger"}


def test_the_way_through_minibatches_epochs_and_a_critic(qwen, rows, tmp_path):
    """A batch is cut into minibatches and small micro-batches, and scored twice by a critic,
    too."""
    module, trainer = run(
        qwen, rows, tmp_path, advantage=GAE(), critic=SharedValueHead(), ppo_epochs=2,
        minibatches=2, max_tokens_per_micro_batch=64, kl=K3Penalty(), gradient_checkpointing=True,
        vision=Vision(train_tower=True),
    )  # fmt: skip
    assert gap(trainer) < AGREED
    assert "visual" in changed(module, qwen)


def test_a_critic_with_a_tower_of_its_own(qwen, rows, tmp_path):
    module, trainer = run(
        qwen, rows, tmp_path, advantage=GAE(), critic=Critic(SeparateValueHead(), lr=1e-2)
    )
    assert gap(trainer) < AGREED
    assert changed(module, qwen) == {"language_model", "lm_head.weight"}
    before, body = Policy(str(qwen)).lm.model, module.policy.value_head.body
    moved = {
        name.partition(".")[0]
        for (name, old), new in zip(before.named_parameters(), body.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert moved == {"language_model"}


def test_lora_adapts_what_is_trained(qwen, rows, tmp_path):
    _, trainer = run(qwen, rows, tmp_path, lora=LoRA(rank=2))
    lm = trainer.lightning_module.policy.lm
    adapted = set(adapted_layers(lm))
    assert adapted
    assert all("language_model" in name for name in adapted)
    seeing = Vision(train_tower=True, train_projector=True)
    module, trainer = run(qwen, rows, tmp_path, lora=LoRA(rank=2), vision=seeing)
    adapted = set(adapted_layers(module.policy.lm))
    assert {"model.visual.blocks.0.attn.qkv", "model.visual.merger.mlp.0"} <= adapted
    assert gap(trainer) < AGREED
    one = LoRA(rank=2, target_modules=r".*visual\.blocks\.\d\.attn\.qkv")
    module, trainer = run(qwen, rows, tmp_path, lora=one)
    assert {name.rpartition(".")[2] for name in adapted_layers(module.policy.lm)} == {"qkv"}
    assert gap(trainer) < AGREED


def test_adapters_apart_are_of_the_language_model_only(qwen, rows, tmp_path):
    apart = {"engine": TransformersEngine(device="cpu", adapters="apart")}
    _, trainer = run(qwen, rows, tmp_path, lora=LoRA(rank=2), data=apart)
    assert gap(trainer) < AGREED
    seeing = Vision(train_tower=True)
    with pytest.raises(ConfigError, match=r"apart.*tower"):
        run(qwen, rows, tmp_path, lora=LoRA(rank=2), vision=seeing, data=apart)
    _, trainer = run(qwen, rows, tmp_path, lora=LoRA(rank=2), vision=seeing)  # merged
    assert gap(trainer) < AGREED


def test_the_probe_has_a_picture_in_it(qwen, rows, tmp_path, monkeypatch):
    seen = []
    look = TransformersEngine.look

    async def noted(engine, pictures, *arguments):
        seen.append(len(pictures))
        return await look(engine, pictures, *arguments)

    monkeypatch.setattr(TransformersEngine, "look", noted)
    only = {"train_prompts": JSONLPrompts(str(rows), seed=1, shuffle=False)}
    _, trainer = run(qwen, rows, tmp_path, data=only)
    assert seen
    assert trainer.callback_metrics["sync/probe_gap"] < AGREED


class Shower(Environment):
    """Shows another picture after each turn, twice."""

    def __init__(self, prompt):
        self.shown = 0
        self.seed = int(prompt.columns["answer"])

    def step(self, turn):
        self.shown += 1
        one = decode(picture(10 * self.seed + self.shown, 48, 32))
        parts = [{"type": "text", "text": "And this?"}, {"type": "image", "image": one}]
        reply = [{"role": "user", "content": parts}]
        return Reply(reply, reward=0.5, done=self.shown == 3)


def test_an_environment_shows_pictures(qwen, rows, tmp_path):
    data = {
        "agent": MultiTurn(Shower, max_turn_tokens=3, allow_rewrites=True),
        "sampling": Sampling(max_tokens=160),
        "rewards": [share_of_even],
    }
    kept = {"engine": TransformersEngine(device="cpu", kept_tokens=10_000)}
    for options in (data, data | kept):
        _, trainer = run(qwen, rows, tmp_path, data=options)
        assert gap(trainer) < AGREED
        rollouts = trainer.datamodule._loader.current
        assert all(len(r.rows) == 1 and r.completed for r in rollouts)
        assert {len(r.rows[0].pictures) - len(r.prompt.pictures) for r in rollouts} == {2}


def test_records_hold_a_picture_once(qwen, rows, tmp_path):
    data = {"groups_per_iteration": 1, "train_prompts": JSONLPrompts(str(rows), shuffle=False)}
    _, trainer = run(qwen, rows, tmp_path, data=data)
    rollouts = trainer.datamodule._loader.current
    shown = rollouts[0].prompt.pictures[0]
    assert len(rollouts) == 4
    records = [rollout.to_dict() for rollout in rollouts]
    text = [r.to_dict() for r in rollouts]
    for record in text:
        for held in (record["prompt"], *record["rows"]):
            held["pictures"] = []
    grown = len(pickle.dumps(records)) - len(pickle.dumps(text))
    assert len(shown.data) < grown < len(shown.data) + 4000
    [*back] = map(Rollout.from_dict, pickle.loads(pickle.dumps(records)))
    assert back[0].rows[0].placed == rollouts[0].rows[0].placed
    assert back[0].rows[0].pictures[0].data is back[3].prompt.pictures[0].data
    old = records[0]
    for held in (old["prompt"], *old["rows"]):
        del held["pictures"], held["places"]
    assert Rollout.from_dict(old).rows[0].pictures == []


@pytest.mark.slow
def test_an_export_is_loaded_by_transformers(model, rows, tmp_path):
    module, _ = run(model, rows, tmp_path, vision=Vision(train_projector=True), lora=LoRA(rank=2))
    module.policy.save_pretrained(tmp_path / "export")
    lm, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "export", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    held = dict(module.policy.named_weights())
    assert all(torch.equal(weight, held[name]) for name, weight in lm.state_dict().items())
    AutoImageProcessor.from_pretrained(tmp_path / "export", backend="pil")
    again = Policy(str(tmp_path / "export"))
    assert again.reader is not None


def test_a_streamed_update_is_the_same(qwen, rows, tmp_path):
    vision = Vision(train_tower=True)
    weights = []
    for collector in (SyncCollector(), StreamedCollector(max_groups_in_flight=2)):
        data = {
            "collector": collector,
            "engine": LotEngine(device="cpu"),
            "train_prompts": JSONLPrompts(str(rows), seed=1),
        }
        module, trainer = run(qwen, rows, tmp_path, vision=vision, data=data, optimizer=sgd)
        weights.append(dict(module.policy.lm.named_parameters()))
        assert gap(trainer) < AGREED
    assert trainer.callback_metrics["policy/streamed_share"] > 0
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-6), name


def test_old_groups_are_replayed_with_their_pictures(qwen, rows, tmp_path):
    buffer = ReplayBuffer(str(tmp_path / "groups.db"), sampler=Mixed(replayed=0.5))
    module, trainer = run(qwen, rows, tmp_path, data={"buffer": buffer}, correction=TokenTIS())
    assert trainer.callback_metrics["buffer/replayed_share"] > 0
    current = trainer.datamodule._loader.current
    assert len(current) > 16  # beside four fresh groups of four
    assert all(r.rows[0].placed[: len(r.prompt.places)] == r.prompt.placed for r in current)
    batch = pack_rollouts(current)
    assert torch.isfinite(module.policy(batch).logprobs).all()


@pytest.mark.slow
def test_a_recorded_run_is_done_again_bit_by_bit(qwen, rows, tmp_path, monkeypatch):
    place = make_place(tmp_path)
    stand_in(place, monkeypatch)
    shutil.copytree(rows.parent, place, dirs_exist_ok=True)
    (place / "train.jsonl").write_bytes(rows.read_bytes())
    (place / "seen_rewards.py").write_text(
        "def even(completion_ids, **columns):\n"
        "    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
        "def light(completions, pictures):\n"
        "    return [sum(i.convert('L').getpixel((9, 9)) for i in p) / 255 for p in pictures]\n"
    )
    isolated = {
        "class_path": "lightning_rl.Isolated",
        "init_args": {"function": "seen_rewards.light"},
    }
    run = RecordedRun(
        train(
            place,
            qwen,
            f"--data.rewards={json.dumps(['seen_rewards.even', isolated])}",
            '--model.vision={"train_projector": true, "tower_lr": 0.001}',
        )
    )
    rerun = rerun_iteration(run, 4, since=0)
    assert rerun.equal, rerun.lines()
    recorded = next(r for r in run.log.rollouts(4) if r.prompt.pictures)
    [again] = rerun_rollout(run, recorded.id)
    assert again.equal
    assert again.gap < ROUNDING
    # Rewards have looked at pictures, in processes of their own.
    shown = {bool(r.prompt.pictures): r.reward_parts["light"] for r in run.log.rollouts(4)}
    assert shown[True] > 0.1
    assert shown.get(False, 0.0) == 0.0


def test_answers_are_imitated_by_the_tower_too(qwen, rows, tmp_path):
    module = SFTModule(
        str(qwen), optimizer=adamw(3e-3), vision=Vision(train_tower=True, tower_lr=1e-3)
    )
    prompts = JSONLPrompts(str(rows), seed=1)
    data = SFTDataModule(prompts, completion_column="answer", batch_size=3)
    trainer = trainer_of(tmp_path)
    trainer.fit(module, data)
    assert {"visual", "language_model"} <= changed(module, qwen)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [3e-3, 1e-3]


@pytest.mark.slow
def test_a_reference_must_read_pictures_alike(qwen, rows, tmp_path):
    other = save_vision_model(tmp_path / "other", "qwen2_5_vl", num_hidden_layers=1)
    _, trainer = run(qwen, rows, tmp_path, kl=K3Penalty(), reference=FrozenReference(str(other)))
    assert trainer.callback_metrics["policy/kl_ref"] > 0
    unlike = save_vision_model(tmp_path / "unlike", "qwen3_vl")
    with pytest.raises(ConfigError, match="does not read pictures as the policy's"):
        run(qwen, rows, tmp_path, kl=K3Penalty(), reference=FrozenReference(str(unlike)))


def test_a_card_says_how_to_load_what_sees(qwen, rows, tmp_path):
    run(qwen, rows, tmp_path, [HFExport(str(tmp_path / "out"))])
    [card] = (tmp_path / "out").rglob("README.md")
    text = card.read_text()
    assert "pipeline_tag: image-text-to-text" in text
    assert "AutoModelForImageTextToText.from_pretrained" in text
    assert (card.parent / "preprocessor_config.json").exists()
