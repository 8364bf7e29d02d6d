"""Run torchrl's PPO for `benchmarks/envs`, in that benchmark's environment.

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
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.envs.task import (
    CLIP,
    ENVS,
    EPS,
    FRAMES,
    LAMBDA,
    MAX_GRAD_NORM,
    TASKS,
    VALUE_COEF,
    Policy,
    Progress,
    Task,
    arguments_of,
)

LEARNED = ("observation", "action", "action_log_prob", "advantage", "value_target")
"""All that the loss reads."""


def layers(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Make two layers of 64 with tanh, and one of ``outputs``, orthogonal."""
    linears = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for linear, scale in zip(linears, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(linear.weight, scale)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2])


def environments(task: Task, seed: int) -> GymWrapper:
    disabled = gymnasium.vector.AutoresetMode.DISABLED  # torchrl resets them itself
    vector = gymnasium.vector.SyncVectorEnv([task.made] * ENVS, autoreset_mode=disabled)
    env = GymWrapper(vector, categorical_action_encoding=True)
    env.set_seed(seed)
    return env


def actor_of(env: gymnasium.Env) -> tuple[ProbabilisticActor, Policy]:
    """Make the policy, for logits or a normal, whose spread does not depend on what is seen."""
    inputs = env.observation_space.shape[0]
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        net: nn.Module = layers(inputs, int(env.action_space.n), 0.01)
        keys: list[str] = ["logits"]
        kind: type[Distribution] = Categorical
    else:
        outputs = env.action_space.shape[0]
        net = nn.Sequential(
            layers(inputs, outputs, 0.01), AddStateIndependentNormalScale(outputs, scale_lb=1e-8)
        )
        keys, kind = ["loc", "scale"], IndependentNormal
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys),
        keys,
        distribution_class=kind,
        return_log_prob=True,
    )

    def policy(observations: Tensor) -> tuple[Tensor, ...]:
        made = net(observations)
        return (made,) if isinstance(made, Tensor) else (made[0], made[1].log())

    return actor, policy


def minibatches(data: TensorDict, count: int) -> Iterator[TensorDict]:
    """Yield rows in a new order."""
    for places in torch.randperm(len(data)).tensor_split(count):
        yield data[places]


def main() -> None:
    arguments = arguments_of(__doc__)
    task = TASKS[arguments.task]
    torch.manual_seed(arguments.seed)
    Distribution.set_default_validate_args(False)
    env = task.made()
    actor, policy = actor_of(env)
    progress = Progress(task, policy, arguments.most)
    critic = ValueOperator(layers(env.observation_space.shape[0], 1, 1.0), ["observation"])
    advantages = GAE(gamma=task.gamma, lmbda=LAMBDA, value_network=critic)
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
    optimizer = torch.optim.Adam(parameters, lr=task.lr, eps=EPS, fused=True)
    collector = Collector(
        environments(task, arguments.seed),
        actor,
        frames_per_batch=FRAMES,
        total_frames=progress.most * FRAMES,
        device="cpu",
        trust_policy=True,
        track_traj_ids=False,
        auto_register_policy_transforms=False,
    )
    progress.begin()
    for data in collector:
        with torch.no_grad():
            rows = advantages(data).select(*LEARNED).reshape(-1)
        for _ in range(task.epochs):
            for batch in minibatches(rows, task.minibatches):
                losses = loss_of(batch)
                loss = losses["loss_objective"] + losses["loss_critic"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
        if progress.iterated():
            break
    collector.shutdown()
    progress.report(arguments.out, "torchrl")


if __name__ == "__main__":
    main()
