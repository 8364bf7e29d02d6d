"""torchrl's PPO on CartPole, for `benchmarks/envs.py`, in that benchmark's environment.

Its example's loop (sota-implementations/ppo: collector, GAE, ClipPPOLoss) at its best: gymnasium's
vector of environments in this process, reset by torchrl (of what it takes the fastest), the
collector's `trust_policy` and no trajectory ids, distributions that do not check their arguments,
advantages once per batch and not once per epoch, rows by index and not from a replay buffer, fused
Adam. A compiled policy is no faster here. Actor and critic are clipped together.
"""

from collections.abc import Iterator

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.envs_task import (
    CLIP,
    ENVS,
    EPOCHS,
    EPS,
    FRAMES,
    GAMMA,
    LAMBDA,
    LR,
    MAX_GRAD_NORM,
    MINIBATCHES,
    VALUE_COEF,
    Progress,
    arguments_of,
    made,
)

LEARNED = ("observation", "action", "action_log_prob", "advantage", "value_target")
"""All that the loss reads."""


def layers(outputs: int, gain: float) -> nn.Sequential:
    """Two of 64 with tanh, and one of ``outputs``, orthogonal."""
    linears = [nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for linear, scale in zip(linears, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(linear.weight, scale)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2])


def environments(seed: int) -> GymWrapper:
    disabled = gymnasium.vector.AutoresetMode.DISABLED  # torchrl resets them itself
    vector = gymnasium.vector.SyncVectorEnv([made] * ENVS, autoreset_mode=disabled)
    env = GymWrapper(vector, categorical_action_encoding=True)
    env.set_seed(seed)
    return env


def minibatches(data: TensorDict) -> Iterator[TensorDict]:
    """Rows in a new order."""
    for places in torch.randperm(len(data)).tensor_split(MINIBATCHES):
        yield data[places]


def main() -> None:
    arguments = arguments_of(__doc__)
    torch.manual_seed(arguments.seed)
    Distribution.set_default_validate_args(False)
    policy, progress = layers(2, 0.01), Progress()
    actor = ProbabilisticActor(
        TensorDictModule(policy, ["observation"], ["logits"]),
        ["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(layers(1, 1.0), ["observation"])
    advantages = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)
    loss_of = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=CLIP,
        entropy_bonus=False,
        critic_coeff=VALUE_COEF,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    parameters = list(loss_of.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LR, eps=EPS, fused=True)
    collector = Collector(
        environments(arguments.seed),
        actor,
        frames_per_batch=FRAMES,
        total_frames=arguments.iterations * FRAMES,
        device="cpu",
        trust_policy=True,
        track_traj_ids=False,
        auto_register_policy_transforms=False,
    )
    progress.begin()
    for data in collector:
        with torch.no_grad():
            rows = advantages(data).select(*LEARNED).reshape(-1)
        for _ in range(EPOCHS):
            for batch in minibatches(rows):
                losses = loss_of(batch)
                loss = losses["loss_objective"] + losses["loss_critic"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
        progress.iterated()
    collector.shutdown()

    def logits(observations: Tensor) -> Tensor:
        found: Tensor = policy(observations)
        return found

    progress.report(arguments.out, logits, "torchrl")


if __name__ == "__main__":
    main()
