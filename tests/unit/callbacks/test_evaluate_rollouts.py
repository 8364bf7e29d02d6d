"""EvaluateRollouts: SFT and DPO runs with the figures of rollouts, and otherwise as without."""

import csv

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_rl import LoRA
from lightning_rl.callbacks import EvaluateRollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError, RewardError
from lightning_rl.learn.dpo import DPOModule, PairDataModule
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from tests.support.small_run import adamw, data_module, grpo, numbers, share_of_sevens, trainer_of

ROWS = [{"prompt": f"{n}=", "completion": "777"} for n in range(100, 124)]
PAIRS = [{"prompt": f"{n}=", "chosen": "777", "rejected": "12"} for n in range(100, 124)]


def evaluation(**options) -> EvaluateRollouts:
    """Return the same evaluation as that of ``data_module``."""
    options = {
        "prompts": numbers(100, 108),
        "rewards": [share_of_sevens],
        "engine": TransformersEngine(device="cpu"),
        "sampling": Sampling(max_tokens=6),
        "success_reward": 0.5,
        "samples": 4,
        "every_n_steps": 2,
        "seed": 7,
    } | options
    return EvaluateRollouts(**options)


def sft(tiny_model) -> tuple[SFTModule, SFTDataModule]:
    data = SFTDataModule(IterablePrompts(ROWS), batch_size=8, seed=3)
    return SFTModule(str(tiny_model), optimizer=adamw(1e-2)), data


def rows_of(tmp_path) -> dict[int, dict[str, float]]:
    """Return what was logged, step by step."""
    with (tmp_path / "csv/version_0/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("eval/accuracy")]
    return {
        int(row["step"]): {name: float(v) for name, v in row.items() if name[:5] == "eval/" and v}
        for row in rows
    }


def test_it_finds_what_an_evaluation_during_rl_finds_and_changes_nothing(tiny_model, tmp_path):
    plain, data = sft(tiny_model)
    trainer_of(tmp_path / "plain").fit(plain, data)

    module, data = sft(tiny_model)
    best = ModelCheckpoint(tmp_path, monitor="eval/reward_mean", mode="max", every_n_train_steps=1)
    trainer = trainer_of(tmp_path, [evaluation(), best], enable_checkpointing=True)
    trainer.fit(module, data)

    found = rows_of(tmp_path)
    assert list(found) == [0, 2, 3]  # before, the second step, and the last
    [wanted] = trainer_of(tmp_path / "rl").validate(grpo(tiny_model), data_module(), verbose=False)
    assert found[0] == pytest.approx({n: v for n, v in wanted.items() if n.startswith("eval/")})
    assert found[3]["eval/reward_mean"] > found[0]["eval/reward_mean"] + 0.3  # it writes sevens now
    assert float(best.best_model_score) == pytest.approx(
        max(found[step]["eval/reward_mean"] for step in (2, 3))
    )
    weights = plain.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in module.state_dict().items())


def test_the_engine_has_the_adapters_that_dpo_trains(tiny_model, tmp_path):
    module = DPOModule(str(tiny_model), optimizer=adamw(3e-2), lora=LoRA(rank=4, alpha=32))
    data = PairDataModule(IterablePrompts(PAIRS), batch_size=8, seed=3)
    evaluate = evaluation(before_training=False, every_n_steps=100)
    logger = CSVLogger(tmp_path, "csv")
    trainer = trainer_of(tmp_path, [evaluate], logger=logger, max_epochs=4)
    trainer.fit(module, data)
    [(step, found)] = rows_of(tmp_path).items()
    assert step == 12
    [before] = trainer_of(tmp_path / "rl").validate(grpo(tiny_model), data_module(), verbose=False)
    assert found["eval/reward_mean"] > before["eval/reward_mean"]
    assert not evaluate.engine.running


def test_a_reward_that_fails_ends_the_run_with_its_reason(tiny_model, tmp_path):
    def broken(completions):
        raise ZeroDivisionError("planted")

    trainer = trainer_of(tmp_path, [evaluation(rewards=[broken])], logger=False)
    with pytest.raises(RewardError, match="reward broken: ZeroDivisionError: planted"):
        trainer.fit(*sft(tiny_model))


def test_a_run_of_rl_has_evaluate(tiny_model, tmp_path):
    trainer = trainer_of(tmp_path, [evaluation()], logger=False)
    with pytest.raises(ConfigError, match="not a PolicyModule; use Evaluate, or remove"):
        trainer.fit(grpo(tiny_model), data_module())


@pytest.mark.parametrize("name", ["samples", "limit", "every_n_steps"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0 must be >= 1"):
        evaluation(**{name: 0})
