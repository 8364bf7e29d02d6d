"""CleanRL's ppo.py on CartPole, for `benchmarks/envs.py`, in that benchmark's environment.

The installed file as it is, run as a script, with the task as its arguments. It was written for gym
0.23, so a module of that name stands for gymnasium: `Counted` and `Vector` below have the calls
that changed since. Its writer writes nothing, and tells when an iteration is over. Actor and critic
are clipped together, and where an episode is cut at its time limit no value stands in.
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

from benchmarks.envs_task import (
    CLIP,
    ENVIRONMENT,
    ENVS,
    EPOCHS,
    FRAMES,
    GAMMA,
    LAMBDA,
    LR,
    MAX_GRAD_NORM,
    MINIBATCHES,
    STEPS,
    VALUE_COEF,
    Progress,
    arguments_of,
    made,
)

LAST = "charts/SPS"
"""What the script writes at the end of an iteration."""


class Counted(gymnasium.wrappers.RecordEpisodeStatistics):
    """With gym's ``seed``."""

    def seed(self, seed: int) -> None:
        self.reset(seed=seed)


class Vector(gymnasium.vector.SyncVectorEnv):
    """With gym's ``reset`` and ``step``: one flag of what is done, and a list of episodes."""

    def __init__(self, makers: Sequence[Callable[[], gymnasium.Env]]) -> None:
        super().__init__(makers, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0]

    def step(self, actions: Any) -> Any:
        observed, rewards, terminated, truncated, infos = super().step(actions)
        done = terminated | truncated
        return observed, rewards, done, _episodes(infos, done) if done.any() else []


def _episodes(infos: dict[str, Any], done: np.ndarray) -> list[dict[str, Any]]:
    found = infos["final_info"]["episode"]
    return [{"episode": {"r": found["r"][e], "l": found["l"][e]}} for e in np.flatnonzero(done)]


def gym_module() -> ModuleType:
    """What the script imports as gym."""
    gym: Any = ModuleType("gym")
    gym.make = lambda name: made()
    gym.spaces = gymnasium.spaces
    gym.wrappers, gym.vector = ModuleType("gym.wrappers"), ModuleType("gym.vector")
    gym.wrappers.RecordEpisodeStatistics = Counted
    gym.vector.SyncVectorEnv = Vector
    module: ModuleType = gym
    return module


class Writer:
    """In place of TensorBoard's; reports to ``Progress``."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def add_text(self, *arguments: Any) -> None:
        """The script has begun."""
        self.progress.begin()

    def add_scalar(self, name: str, *arguments: Any) -> None:
        if name == LAST:
            self.progress.iterated()

    def close(self) -> None:
        pass


def main() -> None:
    arguments = arguments_of(__doc__)
    options = {
        "env-id": ENVIRONMENT,
        "seed": arguments.seed,
        "cuda": False,
        "total-timesteps": arguments.iterations * FRAMES,
        "learning-rate": LR,
        "anneal-lr": False,
        "num-envs": ENVS,
        "num-steps": STEPS,
        "gamma": GAMMA,
        "gae-lambda": LAMBDA,
        "num-minibatches": MINIBATCHES,
        "update-epochs": EPOCHS,
        "clip-coef": CLIP,
        "clip-vloss": False,
        "ent-coef": 0.0,
        "vf-coef": 2 * VALUE_COEF,
        "max-grad-norm": MAX_GRAD_NORM,
    }
    progress = Progress()
    sys.modules["gym"] = gym_module()
    torch.utils.tensorboard.SummaryWriter = lambda directory: Writer(progress)  # type: ignore[misc, assignment]
    found = importlib.util.find_spec("cleanrl")
    assert found is not None and found.submodule_search_locations is not None
    script = f"{next(iter(found.submodule_search_locations))}/ppo.py"
    sys.argv = [script, *(word for k, v in options.items() for word in (f"--{k}", str(v)))]
    left = runpy.run_path(script, run_name="__main__")
    progress.report(arguments.out, left["agent"].actor, "cleanrl")


if __name__ == "__main__":
    main()
