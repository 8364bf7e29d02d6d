"""Test what is refused of Lightning's flags and callbacks in a script, and the page about it."""

import inspect
import warnings
from typing import Any

import lightning.pytorch.callbacks as theirs
import pytest
import torch
from lightning.pytorch import Trainer, loggers, plugins, strategies
from lightning.pytorch.plugins import MixedPrecision

from lightning_rl.callbacks import WeightSync
from lightning_rl.collect.pipeline import GroupSource
from lightning_rl.config.lightning_flags import (
    CALLBACKS,
    TRAINER,
    Verdict,
    compute_dtype,
    refuse_flags,
)
from lightning_rl.data.curriculum import RepeatedPrompts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from lightning_rl.models.policy import Policy, load_tokenizer
from tests.support.lightning_cases import CASES, word_of
from tests.support.lightning_table import PAGE, page
from tests.support.small_run import data_module, grpo, trainer_of

REFUSED_FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"precision": "64-true"}, "precision='64-true': 32-true, bf16-mixed and bf16-true work"),
    ({"precision": "16-true"}, "precision='16-true': 32-true, bf16-mixed and bf16-true work"),
    ({"limit_train_batches": 0}, "limit_train_batches=0: at 0 nothing would be trained"),
    ({"limit_val_batches": 0}, "limit_val_batches=0: .*data.evaluation.limit"),
    ({"limit_val_batches": 0.5}, "limit_val_batches=0.5: .*data.evaluation.limit"),
    ({"limit_test_batches": 3}, "limit_test_batches=3: .*data.evaluation.limit"),
    ({"limit_predict_batches": 3}, "limit_predict_batches=3: .*--iterations"),
    ({"val_check_interval": 1}, "val_check_interval=1: .*every_n_iterations"),
    ({"val_check_interval": 0.5}, "val_check_interval=0.5: .*every_n_iterations"),
    ({"val_check_interval": "00:00:01:00"}, "val_check_interval='60 s': .*every_n_iterations"),
    ({"check_val_every_n_epoch": 2}, "check_val_every_n_epoch=2: .*every_n_iterations"),
    ({"num_sanity_val_steps": 1}, "num_sanity_val_steps=1: .*before_training"),
    ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: .*max_tokens_per_micro_batch"),
    ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0: .*max_grad_norm"),
    ({"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm=.*max_grad_norm"),
    ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1: "),
    ({"model_registry": "mine/model"}, "model_registry='mine/model': .*log_model"),
]

REFUSED_CALLBACKS = {
    "BackboneFinetuning": theirs.BackboneFinetuning(),
    "BaseFinetuning": theirs.BaseFinetuning(),
    "BatchSizeFinder": theirs.BatchSizeFinder(),
    "GradientAccumulationScheduler": theirs.GradientAccumulationScheduler({0: 2}),
    "LearningRateFinder": theirs.LearningRateFinder(),
    "ModelPruning": theirs.ModelPruning("l1_unstructured", amount=0.5),
    "OnExceptionCheckpoint": theirs.OnExceptionCheckpoint("never"),
    "SpikeDetection": theirs.SpikeDetection(),
    "StochasticWeightAveraging": theirs.StochasticWeightAveraging(1e-3),
}


def test_everything_of_lightnings_is_in_the_table():
    arguments = inspect.signature(Trainer.__init__).parameters
    assert set(TRAINER) == set(arguments) - {"self"}
    assert set(CALLBACKS) == set(theirs.__all__)
    given = {
        "flags": set(TRAINER),
        "callbacks": set(CALLBACKS),
        "schedulers": {*torch.optim.lr_scheduler.__all__, "a function"},
        "loggers": set(loggers.__all__),
        "strategies": set(strategies.__all__),
        "plugins": set(plugins.__all__),
    }
    assert {part: set(cases) for part, cases in CASES.items()} == given


def test_a_word_is_what_the_code_does():
    """The cases, which ``test_lightning_table`` runs, agree with the verdicts that refuse."""
    for part, entries in (("flags", TRAINER), ("callbacks", CALLBACKS)):
        words = {name: word_of(cases) for name, cases in CASES[part].items()}
        assert words == {name: entry.verdict.value for name, entry in entries.items()}


def test_the_page_shows_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("flags", "message"), REFUSED_FLAGS, ids=lambda value: str(value)[:40])
def test_a_refused_flag(flags, message, tiny_model, tmp_path):
    module = grpo(tiny_model)
    trainer = trainer_of(tmp_path, [WeightSync()], logger=False, **flags)
    with pytest.raises(ConfigError, match=f"^trainer.{message}"):
        trainer.fit(module, data_module())
    assert module.policy is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_a_refused_callback(name, tiny_model, tmp_path):
    module = grpo(tiny_model)
    callbacks = [WeightSync(), REFUSED_CALLBACKS[name]]
    saves = isinstance(callbacks[1], theirs.Checkpoint)  # else Lightning refuses it first
    trainer = trainer_of(tmp_path, callbacks, logger=False, enable_checkpointing=saves)
    with pytest.raises(ConfigError, match=f"^trainer.callbacks: {name}: ."):
        trainer.fit(module, data_module())
    assert module.policy is None


def test_processes_that_are_spawned_are_refused(tmp_path):
    """The command line refuses before it starts any: Lightning's fit pickles the module first."""
    with pytest.raises(ConfigError, match=r"^trainer.strategy='DDPStrategy': .*use ddp"):
        refuse_flags(trainer_of(tmp_path, logger=False, strategy="ddp_spawn", devices=2))
    refuse_flags(trainer_of(tmp_path, logger=False, strategy="ddp", devices=2))


def test_nothing_refused_is_left_out():
    tried = {name for flags, _ in REFUSED_FLAGS for name in flags} | {"strategy", "plugins"}
    refused = (Verdict.REFUSED, Verdict.PARTLY)
    assert tried == {name for name, entry in TRAINER.items() if entry.verdict in refused}
    assert set(REFUSED_CALLBACKS) == {
        name for name, entry in CALLBACKS.items() if entry.verdict in refused
    }


def test_without_effect_is_warned_of(tiny_model, tmp_path):
    saver = theirs.ModelCheckpoint(every_n_train_steps=2)
    options = {"enable_checkpointing": True, "sync_batchnorm": True, "limit_train_batches": 1}
    trainer = trainer_of(tmp_path, [WeightSync(), saver], logger=False, **options)
    data = data_module(groups_per_iteration=2, group_size=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(grpo(tiny_model), data)
    said = " ".join(str(one.message) for one in seen)
    assert "trainer.sync_batchnorm=True: has no effect" in said
    assert "trainer.callbacks: ModelCheckpoint: every_n_train_steps counts optimizer steps" in said


def test_supervised_training_refuses_a_precision_too(tiny_model, tmp_path):
    rows = IterablePrompts([{"prompt": "12=", "completion": "3"}])
    trainer = trainer_of(tmp_path, [], logger=False, precision="64-true")
    with pytest.raises(ConfigError, match="precision='64-true'"):
        trainer.fit(SFTModule(str(tiny_model)), SFTDataModule(rows))


def in_float16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))


def test_float16_is_refused_where_its_scaled_gradients_would_be_clipped(tiny_model, tmp_path):
    trainer = trainer_of(tmp_path, [WeightSync()], logger=False, plugins=[in_float16()])
    message = "^trainer.precision='16-mixed': .*float16 needs a loss scale, which max_grad_norm"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(grpo(tiny_model), data_module())


def test_supervised_training_in_float16_clips_what_is_unscaled(tiny_model, tmp_path):
    """The clipped gradient is the step at rate 1; still scaled by 64, it would be a 64th."""
    rows = SFTDataModule(IterablePrompts([{"prompt": "12=", "completion": "3"}]))
    module = SFTModule(str(tiny_model), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    options = {"plugins": [in_float16()], "gradient_clip_val": 0.5, "max_steps": 1}
    trainer_of(tmp_path, [], logger=False, **options).fit(module, rows)
    start = Policy(str(tiny_model)).lm.parameters()
    steps = [a - b for a, b in zip(module.policy.lm.parameters(), start, strict=True)]
    assert float(torch.nn.utils.get_total_norm(steps)) == pytest.approx(0.5, rel=1e-2)


def test_an_engine_follows_the_trainer_unless_it_was_told(tmp_path):
    mixed, full = (trainer_of(tmp_path, [], precision=p) for p in ("bf16-mixed", None))
    assert (compute_dtype(mixed), compute_dtype(full)) == ("bfloat16", "float32")
    for chosen, follows in ((None, "bfloat16"), ("float32", "float32"), ("float16", "float16")):
        engine = data_module().engine.__class__(dtype=chosen, device="cpu")
        engine.configure_dtype(compute_dtype(mixed))
        assert engine.dtype == follows
        engine.configure_dtype(compute_dtype(full))
        assert engine.dtype == (chosen or "float32")


def test_prompts_repeat_and_go_on_where_a_state_was_taken(tiny_model):
    def prompts() -> IterablePrompts:
        rows = IterablePrompts([{"prompt": f"{n}="} for n in range(100, 110)], seed=3)
        rows.load(load_tokenizer(str(tiny_model)))
        return rows

    def ids(drawn) -> list[str]:
        return [prompt.id for prompt in drawn]

    first = ids(prompts().draw(4))
    repeated = RepeatedPrompts(prompts(), 4)
    assert ids(repeated.draw(10)) == (first * 3)[:10]
    resumed = RepeatedPrompts(prompts(), 4)
    resumed.load_state_dict(repeated.state_dict())
    assert ids(resumed.draw(6)) == ids(repeated.draw(6)) == (first * 4)[10:16]
    # In the middle of the first round, and without repetition from then on.
    half = RepeatedPrompts(prompts(), 4)
    half.draw(3)
    resumed, plain = RepeatedPrompts(prompts(), 4), prompts()
    resumed.load_state_dict(half.state_dict())
    assert ids(resumed.draw(5)) == (first * 2)[3:8]
    plain.load_state_dict(half.state_dict())
    assert ids(plain.draw(1)) == first[3:4]


def test_ranks_share_prompts_that_repeat(tiny_model):
    """Two ranks have together what one has, in every round."""
    tokenizer = load_tokenizer(str(tiny_model))

    def rounds(rank: int, ranks: int) -> list[list[str]]:
        rows = IterablePrompts([{"prompt": f"{n}="} for n in range(100, 120)], seed=3)
        rows.load(tokenizer)
        groups = 4 // ranks  # of an iteration; two iterations repeat
        source = GroupSource(
            RepeatedPrompts(rows, 8), groups, 1, Sampling(), rank=rank, ranks=ranks
        )
        return [[source.next()[0].prompt.id for _ in range(groups)] for _ in range(6)]

    alone, first, second = rounds(0, 1), rounds(0, 2), rounds(1, 2)
    assert alone == alone[:2] * 3
    for whole, mine, theirs_ in zip(alone, first, second, strict=True):
        assert [id_ for pair in zip(mine, theirs_, strict=True) for id_ in pair] == whole
