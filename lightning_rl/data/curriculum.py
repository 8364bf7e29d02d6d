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


class WeightedRows:
    """Rows drawn in proportion to weights; a change and a draw take O(log rows) steps.

    Weights are kept in a binary tree of sums, each that of its two children, whatever the order of
    changes.
    """

    def __init__(self, weights: np.ndarray) -> None:
        self._leaves = 1 << max(len(weights) - 1, 0).bit_length()
        self._sums = np.zeros(2 * self._leaves)
        self._sums[self._leaves : self._leaves + len(weights)] = weights
        end = self._leaves
        while end > 1:
            below = self._sums[end : 2 * end]
            self._sums[end // 2 : end] = below[::2] + below[1::2]
            end //= 2

    @property
    def total(self) -> float:
        """The sum of all weights; 0 if no row can be drawn."""
        return float(self._sums[1])

    def __setitem__(self, row: int, weight: float) -> None:
        node = self._leaves + row
        self._sums[node] = weight
        while node > 1:
            node //= 2
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    def at(self, share: float) -> int:
        """Return the row where the cumulative weight passes this share, in [0, 1), of the total."""
        rest, node = share * self.total, 1
        while node < self._leaves:
            node *= 2
            # By rounding the rest may reach a sum behind which nothing can be drawn.
            if rest >= self._sums[node] and self._sums[node + 1] > 0:
                rest -= self._sums[node]
                node += 1
        return node - self._leaves


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
        self._free: WeightedRows | None = None  # those that may be drawn now; None: not made yet

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
            if self._free is not None and index not in self._dropped_rows:
                self._free[index] = self._worth(self.pass_rates[index])

    def weights(self) -> np.ndarray:
        """Return the probability that each row is drawn next, up to a factor, shape (rows,)."""
        weights: np.ndarray = self._worth(self.pass_rates)
        weights[list(self._dropped_rows)] = 0.0
        return weights

    def _worth(self, pass_rate: Any) -> Any:
        return self.floor + 4 * pass_rate * (1 - pass_rate)

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
        self._draws, self._waiting, self._free = state["draws"], set(state["waiting"]), None
        self.pass_rates = np.full(len(self), 0.5)
        self.pass_rates[state["learned"]] = state["pass_rates"]

    def _upcoming(self) -> Iterable[int]:
        return ()  # which come depends on how those before are graded

    def _next_index(self) -> int:
        if self._free is None:
            free = self.weights()
            free[list(self._waiting)] = 0.0
            self._free = WeightedRows(free)
        if not self._free.total:  # all are under way: begin anew
            self._waiting.clear()
            self._free = WeightedRows(self.weights())
            if not self._free.total:
                raise self._none_fits()
        # Stateless, so that a resumed run draws the same.
        random = np.random.default_rng([self.seed, self._draws])
        self._draws += 1
        index = self._free.at(random.random())
        self._free[index] = 0.0
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
