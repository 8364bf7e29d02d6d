"""Completions to imitate, beside the rollouts of each iteration."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.sources import supervised_rollout
from lightning_rl.rollout import Rollout
from lightning_rl.run import dist


class Experts:
    """Draws rows with a ``completion``, each as a rollout that no engine wrote.

    Args:
        prompts: the rows.
        per_iteration: how many of them, on all ranks together.
    """

    def __init__(self, prompts: PromptDataset, per_iteration: int) -> None:
        self.prompts = prompts
        self.per_iteration = per_iteration

    def load(self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any]) -> None:
        """Read the rows; comes before ``draw``."""
        self.prompts.load(tokenizer, chat_options)
        self._tokenizer = tokenizer

    def draw(self, iteration: int) -> list[Rollout]:
        """This rank's share of the next ones, each a group of its own: its advantage is zero."""
        prompts = dist.shard(self.prompts.draw(self.per_iteration))
        rollouts = [supervised_rollout(p, "completion", self._tokenizer) for p in prompts]
        for place, rollout in enumerate(rollouts):
            number = place * dist.world_size() + dist.rank()
            rollout.group_id = f"{iteration}/expert/{number}"
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        """Which come next, as primitives."""
        return self.prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.prompts.load_state_dict(state)
