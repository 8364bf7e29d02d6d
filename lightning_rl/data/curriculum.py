"""The order of prompts: more of those that are sometimes solved, or the same ones again."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.prompts import PromptDataset, Prompts
from lightning_rl.data.shaping import ShapedRows
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.errors import ConfigError, DataError, require_finite
from lightning_rl.rollout import Prompt, Rollout, primitives


def row_at(weights: np.ndarray, share: float) -> int:
    """Return the row where the cumulative weight passes this share, in [0, 1), of the total."""
    rows = np.flatnonzero(weights)
    cumulative = weights[rows].cumsum()
    place = int(cumulative.searchsorted(share * cumulative[-1], side="right"))
    return int(rows[min(place, len(rows) - 1)])  # by rounding a share may reach the total


@configurable(prompts=prompts_of)
class PassRateCurriculum(PromptDataset):
    """Draws a prompt with weight floor + 4 p (1 - p), where p is its estimated pass rate.

    p (1 - p) is the variance of a reward of 0 or 1: the value of a group of this prompt to a
    method that compares its rollouts. p starts at 1/2 and follows the share of passed rollouts of
    each graded group, p <- memory p + (1 - memory) share. A prompt that was drawn is not drawn
    again until its group was graded, as long as there are others.

    Args:
        prompts: source of the prompts; its columns, seed and limits apply, its order does not.
        success_reward: a rollout with at least this reward passed.
        floor: additional weight of every prompt, so that those always or never solved, which would
            have weight 0, still come back in case the policy has changed.
        memory: how slowly p follows, in [0, 1).

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        prompts: AnyPrompts,
        success_reward: float = 1.0,
        floor: float = 0.05,
        memory: float = 0.5,
    ) -> None:
        require_finite(success_reward=success_reward, floor=floor)
        if floor <= 0 or not 0 <= memory < 1:
            raise ConfigError(
                f"PassRateCurriculum(floor={floor}, memory={memory}): need floor > 0 and memory "
                "in [0, 1)"
            )
        super().__init__(
            prompt_column=prompts.prompt_column,
            id_column=prompts.id_column,
            max_prompt_tokens=prompts.max_prompt_tokens,
            seed=prompts.seed,
        )
        self.prompts = prompts
        self.success_reward = success_reward
        self.floor = floor
        self.memory = memory
        self.pass_rates = np.zeros(0)
        """Estimated p of every row."""
        self._draws = 0
        self._waiting: set[int] = set()
        self._index: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"PassRateCurriculum({self.prompts!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        return self.prompts.read()

    def shaped(self) -> ShapedRows:
        return self.prompts.shaped()

    def load(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        fresh = self._shaped is None
        super().load(tokenizer, chat_options)
        if not fresh:
            return
        self.pass_rates = np.full(len(self), 0.5)
        self._index = {self._prompt_id(index): index for index in range(len(self))}
        if len(self._index) < len(self):
            raise DataError(
                f"{self!r}: {self.id_column!r} is not unique ({len(self._index)} different ids in "
                f"{len(self)} rows), so pass rates cannot be told apart; name another id_column"
            )

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Update pass rates from graded groups, including those that a filter rejected."""
        for group in groups:
            index = self._index.get(group[0].prompt.id)
            if index is None:  # from a replay buffer, say, of other prompts
                continue
            self._waiting.discard(index)
            rewards = [rollout.reward for rollout in group if rollout.reward is not None]
            if rewards:
                share = sum(reward >= self.success_reward for reward in rewards) / len(rewards)
                old = self.pass_rates[index]
                self.pass_rates[index] = self.memory * old + (1 - self.memory) * share

    def weights(self) -> np.ndarray:
        """Return the probability that each row is drawn next, up to a factor, shape (rows,)."""
        weights: np.ndarray = self.floor + 4 * self.pass_rates * (1 - self.pass_rates)
        weights[list(self._dropped_rows)] = 0.0
        return weights

    def state_dict(self) -> dict[str, Any]:
        learned = np.flatnonzero(self.pass_rates != 0.5)
        return super().state_dict() | {
            "draws": self._draws,
            "waiting": sorted(self._waiting - self._dropped_rows),
            "learned": learned.tolist(),
            "pass_rates": self.pass_rates[learned].tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._draws, self._waiting = state["draws"], set(state["waiting"])
        self.pass_rates = np.full(len(self), 0.5)
        self.pass_rates[state["learned"]] = state["pass_rates"]

    def _upcoming(self) -> Iterable[int]:
        return ()  # which come depends on how those before are graded

    def _next_index(self) -> int:
        free = self.weights()
        if not np.delete(free, list(self._waiting)).any():  # all are under way: begin anew
            self._waiting.clear()
        free[list(self._waiting)] = 0.0
        if not free.any():
            raise self._none_fits()
        # Stateless, so that a resumed run draws the same.
        random = np.random.default_rng([self.seed, self._draws])
        self._draws += 1
        index = row_at(free, random.random())
        self._waiting.add(index)
        return index


class RepeatedPrompts:
    """The first ``period`` prompts that a data set draws, repeated forever.

    If ``period`` is n x ``groups_per_iteration``, iteration i has the prompts of iteration i mod n.

    Args:
        prompts: source of the prompts.
        period: number of prompts.
    """

    def __init__(self, prompts: Prompts, period: int) -> None:
        self._prompts = prompts
        self._period = period
        self._kept: list[Prompt] = []
        self._place = 0

    def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts."""
        drawn = []
        for _ in range(count):
            if self._place == len(self._kept) < self._period:
                self._kept += self._prompts.draw(1)
            drawn.append(self._kept[self._place])
            self._place = (self._place + 1) % self._period
        return drawn

    @property
    def dropped(self) -> int:
        """Number of prompts that were too long."""
        return self._prompts.dropped

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Show the data set every graded group."""
        self._prompts.observe(groups)

    def shares(self) -> dict[str, float]:
        """Return the expected share of each named set in the groups to come."""
        return self._prompts.shares()

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's state and the repeated prompts; primitives only."""
        kept = [primitives(prompt) for prompt in self._kept]
        return self._prompts.state_dict() | {"repeated": kept, "repeated_place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; that of a run without repetition starts to repeat."""
        self._prompts.load_state_dict(state)
        self._kept = [Prompt(**record) for record in state.get("repeated", [])][: self._period]
        self._place = state.get("repeated_place", 0) % self._period
