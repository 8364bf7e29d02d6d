"""Test what Lightning and processes ask of a module and its agents."""

import re

import pytest
import torch
from lightning.pytorch import LightningModule as PlainModule
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from tensordict import TensorDict

from lightning_rl.callbacks import RLCallback
from lightning_rl.envs import ActorCriticModule, EnvDataModule, Gym, OffPolicyModule
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.envs.torchrl_space import Places
from tests.support import worlds  # registers the environments
from tests.support.small_run import trainer_of

SPACE = Space({"observation": Observed((2,))}, {"action": Discrete(2)})


class HookNames(RLCallback):
    """Keeps what Lightning has noted as the present hook."""

    def __init__(self):
        self.names = set()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.names.add(pl_module._current_fx_name)


def fit(tmp_path, **options):
    data = EnvDataModule(
        Gym(f"{worlds.__name__}:Walk-v0"), 2, 16, iterations_per_epoch=1, eval_episodes=0
    )
    hooks = HookNames()
    trainer = trainer_of(tmp_path, [hooks], logger=False, **options)
    trainer.fit(ActorCriticModule(epochs=1, minibatches=2), data)
    assert hooks.names == {"on_before_optimizer_step"}
    return trainer.profiler


def test_a_profiler_that_was_given_sees_all_hooks(tmp_path):
    given = SimpleProfiler(dirpath=tmp_path, filename="profile")
    assert fit(tmp_path, profiler=given) is given
    seen = [n for n in given.recorded_durations if n.endswith("HookNames.on_before_optimizer_step")]
    assert [len(given.recorded_durations[name]) for name in seen] == [2]
    assert isinstance(fit(tmp_path), PassThroughProfiler)  # none is asked for


@pytest.mark.parametrize("agents", [0, 2])
def test_rewards_of_torchrl_may_be_whole_numbers(agents):
    data = TensorDict({"next": {"reward": torch.tensor([[[3], [-1]]])}}, [1, 2])
    rewards = Places({}, {}, {}, ("reward",), shared_reward=agents > 0).rewards(data, agents)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[[3, 3], [-1, -1]] if agents else [3, -1]]


@pytest.mark.parametrize(
    ("module", "planned"),
    [
        (ActorCriticModule(epochs=2, minibatches=4), "; 8 optimizer steps on about 4 frames each"),
        (OffPolicyModule(), ""),
        (PlainModule(), None),
    ],
)
def test_a_check_makes_all_of_a_run_and_collects_a_batch(tmp_path, module, planned):
    data = EnvDataModule(Gym(f"{worlds.__name__}:Walk-v0"), 2, 16, eval_episodes=0)
    trainer = trainer_of(tmp_path, logger=False)
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    trainer.datamodule = data
    lines = data.check(module)
    if planned is None:
        assert lines is None
        return
    assert lines[0].endswith("Walk-v0, 2 copies side by side")
    assert lines[1] == "  agent sees observation (2,) and does action (one of 2)"
    parameters = sum(p.numel() for p in module.parameters())
    assert lines[2] == f"agents: agent: MLPBody ({parameters:,} parameters)"
    assert re.fullmatch(rf"an iteration: 8 steps of each environment, \S+ MiB{planned}", lines[3])
