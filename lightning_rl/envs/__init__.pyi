"""Environments for small networks, each name from its module."""

from lightning_rl.envs.algos.steps import (
    StepAdvantage as StepAdvantage,
    StepGAE as StepGAE,
    StepReturn as StepReturn,
    Steps as Steps,
)
from lightning_rl.envs.base import (
    EnvModule as EnvModule,
)
from lightning_rl.envs.batches import (
    steps_of as steps_of,
)
from lightning_rl.envs.collector import (
    EnvCollector as EnvCollector,
    EnvEpisode as EnvEpisode,
    EnvError as EnvError,
)
from lightning_rl.envs.datamodule import (
    EnvDataModule as EnvDataModule,
)
from lightning_rl.envs.episode_preview import (
    EpisodePreview as EpisodePreview,
)
from lightning_rl.envs.gym import (
    Gym as Gym,
)
from lightning_rl.envs.maker import (
    EnvMaker as EnvMaker,
    TorchRLEnv as TorchRLEnv,
)
from lightning_rl.envs.module import (
    ActorCriticModule as ActorCriticModule,
)
from lightning_rl.envs.networks.actor_critic import (
    ActorCritic as ActorCritic,
)
from lightning_rl.envs.networks.agent import (
    EnvAgent as EnvAgent,
)
from lightning_rl.envs.networks.bodies import (
    Body as Body,
    CNNBody as CNNBody,
    MLPBody as MLPBody,
)
from lightning_rl.envs.networks.graph import (
    GraphBody as GraphBody,
    NodeHead as NodeHead,
)
from lightning_rl.envs.networks.groups import (
    Centralized as Centralized,
    PerAgent as PerAgent,
)
from lightning_rl.envs.networks.memory import (
    GRUBody as GRUBody,
    RecurrentBody as RecurrentBody,
)
from lightning_rl.envs.networks.policy_heads import (
    BernoulliHead as BernoulliHead,
    CategoricalHead as CategoricalHead,
    GaussianHead as GaussianHead,
    PolicyHead as PolicyHead,
    TanhGaussianHead as TanhGaussianHead,
)
from lightning_rl.envs.networks.q_agent import (
    DuelingHead as DuelingHead,
    QAgent as QAgent,
    QHead as QHead,
)
from lightning_rl.envs.networks.sac_agent import (
    ActionCritic as ActionCritic,
    SACAgent as SACAgent,
)
from lightning_rl.envs.networks.space import (
    Space as Space,
)
from lightning_rl.envs.off_policy import (
    OffPolicyModule as OffPolicyModule,
)
from lightning_rl.envs.pool import (
    PooledGym as PooledGym,
)
from lightning_rl.envs.rows import (
    Clips as Clips,
)
from lightning_rl.envs.step_loss import (
    JointLoss as JointLoss,
    StepLoss as StepLoss,
    TorchRLLoss as TorchRLLoss,
)
