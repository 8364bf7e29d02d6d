"""Run CleanRL's PPO for `benchmarks/envs`, in that benchmark's environment.

The installed files as they are, run as scripts, with the task as arguments: ppo.py, and for actions
that are real numbers ppo_continuous_action.py, whose wrappers that normalise observations and
rewards are left out, for no other side has them. They were written for gym 0.23 and gymnasium 0.28,
so modules of these names stand for the gymnasium of today: `Old` and `Vector` below have the calls
that changed since. Their writer writes nothing, and tells when an iteration is over. Actor and
critic are clipped together, and where an episode is cut at its time limit no value stands in.
"""

import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import torch.utils.tensorboard
from torch import Tensor

from benchmarks.envs.task import (
    CLIP,
    ENVS,
    FRAMES,
    LAMBDA,
    MAX_GRAD_NORM,
    STEPS,
    TASKS,
    VALUE_COEF,
    Progress,
    Task,
    arguments_of,
)

LAST = "charts/SPS"
"""The metric that scripts write at the end of an iteration."""


class Over(Exception):
    """The run has what it was for."""


class Seeded(gymnasium.Wrapper):
    """Accepts gym's ``seed``."""

    def seed(self, seed: int) -> None:
        self.reset(seed=seed)


class Vector(gymnasium.vector.SyncVectorEnv):
    """Resets an environment in the step that ends its episode, and tells nothing of episodes."""

    def __init__(self, makers: Sequence[Callable[[], gymnasium.Env]]) -> None:
        super().__init__(makers, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> Any:
        *answered, _ = super().step(actions)
        return *answered, {}


class OldVector(Vector):
    """Follows gym's old API: ``reset`` and ``step`` return a flag that says what is done."""

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0]

    def step(self, actions: Any) -> Any:
        observed, rewards, terminated, truncated, infos = super().step(actions)
        return observed, rewards, np.logical_or(terminated, truncated), infos


def gym_module(task: Task, name: str, vector: type[Vector]) -> ModuleType:
    """Build the module that a script imports as gym, or as gymnasium."""
    gym: Any = ModuleType(name)
    gym.make = lambda name: task.made()
    gym.spaces = gymnasium.spaces
    gym.wrappers, gym.vector = ModuleType(f"{name}.wrappers"), ModuleType(f"{name}.vector")
    gym.wrappers.RecordEpisodeStatistics = Seeded
    gym.wrappers.FlattenObservation = gymnasium.wrappers.FlattenObservation
    gym.wrappers.ClipAction = gymnasium.wrappers.ClipAction
    for other in ("NormalizeObservation", "TransformObservation"):
        setattr(gym.wrappers, other, _as_it_is)
    for other in ("NormalizeReward", "TransformReward"):
        setattr(gym.wrappers, other, _as_it_is)
    gym.vector.SyncVectorEnv = vector
    module: ModuleType = gym
    return module


def _as_it_is(env: gymnasium.Env, *arguments: Any, **options: Any) -> gymnasium.Env:
    return env


class Writer:
    """Replaces TensorBoard's writer; reports to ``Progress``."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def add_text(self, *arguments: Any) -> None:
        """Note that the script has begun."""
        self.progress.begin()

    def add_scalar(self, name: str, *arguments: Any) -> None:
        if name == LAST and self.progress.iterated():
            raise Over

    def close(self) -> None:
        pass


def policy(observations: Tensor) -> tuple[Tensor, ...]:
    """Act by the policy of the script at hand."""
    main: Any = sys.modules["__main__"]
    if hasattr(main.agent, "actor"):
        return (main.agent.actor(observations),)
    return main.agent.actor_mean(observations), main.agent.actor_logstd


def options_of(task: Task, most: int, seed: int) -> dict[str, object]:
    """Return the task as the scripts' arguments."""
    return {
        "env-id": task.environment,
        "seed": seed,
        "cuda": False,
        "total-timesteps": most * FRAMES,
        "learning-rate": task.lr,
        "anneal-lr": False,
        "num-envs": ENVS,
        "num-steps": STEPS,
        "gamma": task.gamma,
        "gae-lambda": LAMBDA,
        "num-minibatches": task.minibatches,
        "update-epochs": task.epochs,
        "clip-coef": CLIP,
        "clip-vloss": False,
        "ent-coef": 0.0,
        "vf-coef": 2 * VALUE_COEF,
        "max-grad-norm": MAX_GRAD_NORM,
    }


def main() -> None:
    arguments = arguments_of(__doc__)
    task = TASKS[arguments.task]
    progress = Progress(task, policy, arguments.most)
    env = task.made()
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    gym = gym_module(task, "gym", OldVector) if discrete else gym_module(task, "gymnasium", Vector)
    torch.utils.tensorboard.SummaryWriter = lambda directory: Writer(progress)  # type: ignore[misc, assignment]
    found = importlib.util.find_spec("cleanrl")
    assert found is not None and found.submodule_search_locations is not None
    name = "ppo.py" if discrete else "ppo_continuous_action.py"
    script = f"{next(iter(found.submodule_search_locations))}/{name}"
    options = options_of(task, progress.most, arguments.seed)
    sys.argv = [script, *(word for k, v in options.items() for word in (f"--{k}", str(v)))]
    own = sys.modules.get(gym.__name__)
    sys.modules[gym.__name__] = gym
    try:
        runpy.run_path(script, run_name="__main__")
    except Over:
        pass
    finally:
        sys.modules[gym.__name__] = own  # type: ignore[assignment]
    progress.report(arguments.out, "cleanrl")


if __name__ == "__main__":
    main()
