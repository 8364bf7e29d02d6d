"""StepBuffer: torchrl's replay buffer, with a state from which a run resumes bit-equal."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl.envs.networks.exploring import ExploringAgent
from lightning_rl.run.processes import dist


def single_steps(batch: TensorDict, agents: Mapping[str, ExploringAgent]) -> TensorDict:
    """Flatten a batch to single steps [T * E], ordered by time; see :mod:`.batches`.

    An agent's steps are under its name, in torchrl's form: observations, ``action`` and under
    ``next`` observations, ``reward``, ``done`` and ``terminated``, all (N, *A, ...). ``skipped``
    steps are left out.
    """
    after, steps = batch["next"], {}
    for name, agent in agents.items():
        assert agent.space is not None
        nested = isinstance(batch.get(name, None), TensorDict)
        own, then = (batch[name], after[name]) if nested else (batch, after)
        reward, seen = then["reward"], list(agent.space.observations)
        of_all = [1] * (reward.ndim - 2)  # whether it is over is said once for a group
        over = {
            key: after[key].reshape(*batch.shape, *of_all).expand_as(reward)
            for key in ("done", "terminated")
        }
        steps[name] = {
            **{key: own[key] for key in seen},
            "action": own[agent.action],
            "next": {**{key: then[key] for key in seen}, "reward": reward, **over},
        }
    in_time = TensorDict(steps, batch.shape).transpose(0, 1).flatten(0, 1)
    return in_time[~batch["skipped"].T.flatten()] if "skipped" in batch else in_time


class StepBuffer:
    """The last ``capacity`` steps of a run on one rank, in main memory.

    Its state is ours because torchrl's is no copy, always of the whole capacity, and of one rank: a
    run that is resumed on other, or more, ranks shares out what all of them had.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._steps: Any = None  # torchrl is imported when it is needed

    @property
    def steps(self) -> Any:
        """torchrl's buffer."""
        if self._steps is None:
            from torchrl.data import LazyTensorStorage, ReplayBuffer

            self._steps = ReplayBuffer(storage=LazyTensorStorage(self.capacity))
        return self._steps

    @property
    def added(self) -> int:
        """Steps added since the run began, including those replaced."""
        return int(self.steps.write_count)

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, rows: TensorDict) -> None:
        """Add steps [N], the oldest first."""
        if len(rows):
            self.steps.extend(rows.cpu())

    def sample(self, count: int) -> TensorDict:
        """Sample steps [count], with replacement, by torch's global generator."""
        rows: TensorDict = self.steps.sample(count)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' steps, the oldest first; tensors and primitives."""
        order = torch.arange(self.added - len(self), self.added) % self.capacity
        rows = self.steps[order].to_dict() if len(self) else None  # a copy
        return {"ranks": dist.gather({"added": self.added, "rows": rows})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore those steps, each to its place; a smaller buffer keeps the newest."""
        self._steps = None
        shares = [share for share in state["ranks"] if share["rows"] is not None]
        if not shares:
            return
        kept = [TensorDict(share["rows"]).auto_batch_size_(1) for share in shares]
        added = [share["added"] for share in shares]
        ranks, rank = dist.world_size(), dist.rank()
        if len(shares) == ranks:
            own, count = kept[rank], added[rank]
        else:
            own = torch.cat(kept)[rank::ranks]
            count = max(sum(added) // ranks, len(own))
        begin = count % self.capacity if len(own) >= self.capacity else 0
        before = {"_cursor": begin, "_write_count": count - len(own)}
        self.steps.writer.load_state_dict(before)
        self.steps.extend(own)
