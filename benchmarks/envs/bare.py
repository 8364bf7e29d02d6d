"""Time the library's iteration, a bare loop of its parts, and the environment alone.

For `benchmarks/envs`, which runs it in a process of its own, on CartPole. After or before each
iteration of `Trainer.fit`, in turn, comes one of a bare loop with the same start and seeds:
collect, rows, update, without Trainer and loader. Both collect the very same batch, which is
checked. Then the actions of that batch are taken in environments of the same seeds, and nothing
else is done.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from tensordict import TensorDict

from benchmarks.envs.ours import fit, made_of, make_data, make_module
from benchmarks.envs.task import ENVS, STEPS, TASKS, arguments_of, cpu_now
from lightning_rl.envs.batches import handed_out
from lightning_rl.envs.gym import ACTION
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.gym_player import episode_seed
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.module import ActorCriticModule
from lightning_rl.envs.rows import rows_of

TASK = TASKS["cartpole"]
SECONDS = 60.0
"""The longest time of a step, as in the data module."""


class BareLoop:
    """An iteration of training, step by named step."""

    def __init__(self, fitted: ActorCriticModule, seed: int) -> None:
        self.module = make_module(TASK, seed)
        agents: Any = self.module.agents
        agents[AGENT] = copy.deepcopy(fitted.agents[AGENT])
        Fabric(accelerator="cpu", devices=1).setup(self.module, self.module.configure_optimizers())
        self.collector = GymCollector(made_of(TASK), None, SECONDS)
        self.collector.start(seed, 0, ENVS)

    def iterate(self) -> TensorDict:
        """Collect and learn; returns the batch."""
        module = self.module
        agents: Any = module.agents
        collected = self.collector.collect(agents, module.iteration, STEPS)
        batch = handed_out(collected, self.collector.agents)
        rows, _ = rows_of(agents[AGENT], AGENT, batch, module.advantage)
        module.update({AGENT: rows}, (ENVS, STEPS))
        module.iteration += 1
        return batch


class Alone:
    """Environments in which actions are taken that are known before."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.envs = [TASK.made() for _ in range(ENVS)]
        self.episodes = [-1] * ENVS
        for place in range(ENVS):
            self._begin(place)

    def _begin(self, place: int) -> None:
        self.episodes[place] += 1
        seed = episode_seed(self.seed, place, self.episodes[place])
        self.envs[place].reset(seed=seed)

    def take(self, actions: list[list[int]]) -> int:
        """Take an action for each, ``STEPS`` times; return how many episodes came to an end."""
        over = 0
        for row in actions:
            for place, env in enumerate(self.envs):
                _, _, terminated, truncated, _ = env.step(row[place])
                if terminated or truncated:
                    self._begin(place)
                    over += 1
        return over


class Compare(Callback):
    """Times the Trainer's iterations and the bare loop's, in turn the one and the other first."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rows: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ActorCriticModule)
        self.bare, self.alone = BareLoop(pl_module, self.seed), Alone(self.seed)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin(0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fitted = cpu_now() - self.since
        if not batch_idx % 2:
            self.run_bare()
        if not torch.equal(actions_of(batch), actions_of(self.bare_batch)):
            raise RuntimeError("Trainer and bare loop collected different batches")
        actions = actions_of(batch).T.tolist()
        begin = cpu_now()
        over = self.alone.take(actions)
        row = {"fit": fitted, "bare": self.bare_seconds, "alone": cpu_now() - begin}
        if over != int(batch["next", "done"].sum()):
            raise RuntimeError("the environments went another way than in training")
        self.rows.append(row)
        self.begin(batch_idx + 1)

    def begin(self, iteration: int) -> None:
        """Begin the Trainer's next iteration; before every other one, run the bare loop's."""
        if iteration % 2:
            self.run_bare()
        self.since = cpu_now()

    def run_bare(self) -> None:
        begin = cpu_now()
        self.bare_batch = self.bare.iterate()
        self.bare_seconds = cpu_now() - begin


def actions_of(batch: TensorDict) -> torch.Tensor:
    """Return the actions, (E, T)."""
    actions: torch.Tensor = batch[ACTION]
    return actions


def main() -> None:
    arguments = arguments_of(__doc__)
    seed_everything(arguments.seed, verbose=False)
    compare, data = Compare(arguments.seed), make_data(TASK, arguments.most, arguments.seed)
    fit(make_module(TASK, arguments.seed), data, compare)
    Path(arguments.out).write_text(json.dumps({"rows": compare.rows}))


if __name__ == "__main__":
    main()
