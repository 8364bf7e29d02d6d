"""Agents act in the precision in which they learn."""

from typing import ClassVar

import pytest
import torch

from lightning_rl import Evaluate
from lightning_rl.callbacks import RLCallback
from lightning_rl.envs import ActorCritic, ActorCriticModule, EnvDataModule, Gym, MLPBody
from lightning_rl.envs.batches import steps_of
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.actor_critic import joint_log_prob
from lightning_rl.errors import ConfigError
from tests.support import worlds  # registers the environments
from tests.support.small_run import trainer_of


class Telling(MLPBody):
    """Notes of what kind its features are."""

    made: ClassVar[set[torch.dtype]] = set()

    def forward(self, observations):
        features = super().forward(observations)
        self.made.add(features.dtype)
        return features


class Scored(RLCallback):
    """Measures how far logprobs before an update's first step are from the noted ones."""

    def __init__(self):
        self.gaps = []

    def on_update_start(self, trainer, pl_module, batch):
        own, agent = steps_of(batch, pl_module.agents)[AGENT], pl_module.agents[AGENT]
        made, _ = agent(own["observations"])  # in training_step, so autocast is on
        found = joint_log_prob(made, own["actions"])
        assert found.dtype == own["logprobs"].dtype == torch.float32
        self.gaps.append(float((found - own["logprobs"]).abs().max()))


@pytest.mark.parametrize(
    ("precision", "kind", "gap"),
    [
        ("32-true", torch.float32, 1e-5),
        # A sum in another order is rounded to another number now and then.
        ("bf16-mixed", torch.bfloat16, 0.02),
    ],
)
@pytest.mark.parametrize("world", ["Walk", "Reach"])
def test_ratios_begin_at_one(tmp_path, world, precision, kind, gap):
    Telling.made.clear()
    data = EnvDataModule(
        Gym(f"{worlds.__name__}:{world}-v0"),
        num_envs=4,
        frames_per_iteration=128,
        iterations_per_epoch=3,
        eval_episodes=2,
        seed=1,
    )
    torch.manual_seed(0)
    scored = Scored()
    module = ActorCriticModule({AGENT: ActorCritic(Telling([16]))}, seed=1)
    callbacks = [scored, Evaluate(every_n_iterations=1)]
    trainer_of(tmp_path, callbacks, logger=False, precision=precision).fit(module, data)
    assert Telling.made == {kind}  # also where it collects and evaluates
    assert len(scored.gaps) == 3
    assert max(scored.gaps) < gap


def test_weights_of_16_bits_are_refused(tmp_path):
    data = EnvDataModule(Gym(f"{worlds.__name__}:Walk-v0"), eval_episodes=0)
    with pytest.raises(ConfigError, match=r"precision='bf16-true'.*use bf16-mixed"):
        trainer_of(tmp_path, precision="bf16-true").fit(ActorCriticModule(), data)
