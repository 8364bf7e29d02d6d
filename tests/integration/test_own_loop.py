"""Test fit(batch) and sync_weights in a script, which do what a Trainer's run does."""

import pytest
import torch

from lightning_rl import SequenceTIS, WarmupLinear
from lightning_rl.agents.base import SingleTurn
from lightning_rl.callbacks import WeightSync
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError, RewardError, StaleWeightsError, WrongWeightsError
from lightning_rl.learn.own_loop import OwnLoop
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.rewards.base import Rewards
from tests.support.small_run import Rows, data_module, grpo, ppo, share_of_sevens, trainer_of


class Recorder(Rows):
    """An iteration's rollouts, as they were trained on, and its metrics."""

    def __init__(self):
        super().__init__()
        self.rollouts = []

    def on_update_start(self, trainer, pl_module, batch):
        self.rollouts.append(trainer.datamodule._loader.current)


def schedule(optimizer):
    return WarmupLinear(optimizer, warmup_steps=2, total_steps=9)


@pytest.mark.parametrize("make", [grpo, ppo])
def test_fit_does_what_a_trainer_does_with_the_same_rollouts(make, tiny_model, tmp_path):
    options = {"lr_scheduler": schedule, "correction": SequenceTIS(), "minibatches": 2}
    module, recorder = make(tiny_model, **options), Recorder()
    datamodule = data_module(iterations_per_epoch=3)
    trainer_of(tmp_path, [WeightSync(), recorder]).fit(module, datamodule=datamodule)
    alone = OwnLoop(make(tiny_model, **options))
    for place, rollouts in enumerate(recorder.rollouts):
        metrics = alone.fit(rollouts)
        told = recorder.rows[place + 1]
        assert {name: told[name] for name in metrics} == metrics
    assert alone.module.iteration == 3
    trained, own = module.policy.state_dict(), alone.learner.policy.state_dict()
    assert all(torch.equal(trained[name], own[name]) for name in trained)


@pytest.fixture
def engine(tiny_model, tmp_path):
    engine = TransformersEngine(device="cpu")
    save_skeleton(str(tiny_model), tmp_path)
    engine.start(tmp_path)
    yield engine
    engine.close()


def test_a_script_of_ten_lines_learns(engine, tiny_model):
    loop = OwnLoop(grpo(tiny_model))
    prompts = IterablePrompts([{"prompt": f"{n}="} for n in range(100, 140)], seed=1)
    prompts.load(loop.module.tokenizer)
    sampling = Sampling(max_tokens=6)
    pipeline = RolloutPipeline(
        engine, SingleTurn(), Rewards([share_of_sevens]), loop.module.tokenizer
    )
    source, rewards = GroupSource(prompts, 6, 8, sampling, seed=7), []
    for iteration in range(8):
        assert loop.sync_weights(engine, probe=prompts.first(2)) < 1e-4
        assert engine.version == iteration
        source.begin(iteration)
        groups = [source.next() for _ in range(source.num_groups)]
        pipeline.complete(groups, sampling)
        rollouts = [rollout for group in groups for rollout in group]
        rewards.append(sum(r.reward for r in rollouts) / len(rollouts))
        loop.fit(rollouts)
    assert rewards[-1] > rewards[0] + 0.2, rewards


def test_a_stale_engine_is_found_and_wrong_calls_are_refused(engine, tiny_model, tmp_path):
    loop = OwnLoop(grpo(tiny_model))
    loop.sync_weights(engine)
    prompts = IterablePrompts([{"prompt": "100="}])
    prompts.load(loop.module.tokenizer)
    kept = engine.load_weights
    engine.load_weights = lambda weights, version: None  # an engine that takes nothing over
    with torch.no_grad():
        next(loop.learner.policy.parameters()).mul_(3.0)
    with pytest.raises(WrongWeightsError, match="after the push of version 0, Transformers"):
        loop.sync_weights(engine)
    engine.version = 0
    with pytest.raises(StaleWeightsError, match="version 0, engine and trainer disagree by"):
        loop.sync_weights(engine, probe=prompts.first(), digests=False)
    engine.load_weights = kept
    assert loop.sync_weights(engine, probe=prompts.first()) < 1e-4
    with pytest.raises(RewardError, match="none of 0 rollouts"):
        loop.fit([])
    trainer = trainer_of(tmp_path, [WeightSync()], fast_dev_run=1, logger=False)
    other = grpo(tiny_model)
    trainer.fit(other, datamodule=data_module())
    with pytest.raises(ConfigError, match=r"belongs to a Trainer.*callback WeightSync pushes"):
        OwnLoop(other)
